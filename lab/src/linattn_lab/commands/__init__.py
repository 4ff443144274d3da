"""The laboratory's subcommands of `linattn`, one file each, which are imported when they are asked for."""

# What each does, as the first sentence of its function says: help is not to import them all.
COMMANDS = {
    "audit": "Measure the error of linear attention on a model; with --budget, that of a bounded KV cache.",
    "bench": "Measure the length from which linear attention is faster than exact attention, on your shapes.",
    "report": "Write the report's page again from its files, open it, or print its figures as JSON.",
    "reproduce": "Measure published claims about linear attention, the Performer paper's among them: which hold?",
    "train": "Train a language model of bytes with linear or softmax attention, and measure its bits per byte.",
}
