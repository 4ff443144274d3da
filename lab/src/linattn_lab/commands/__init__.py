"""The laboratory's subcommands of `linattn`, one file each, which are imported when they are asked for."""

# What each does, as the first sentence of its function says: help is not to import them all.
COMMANDS = {
    "audit": "Measure how wrong linear attention is on a model: every layer, head and method, and the whole model.",
    "bench": "Measure from which length on linear attention is faster than exact attention, on your shapes.",
    "report": "Write the page of the figures again, open it, or print its figures as JSON.",
    "reproduce": "Measure the claims of the founding texts and of the Performer paper, and say which hold.",
    "train": "Train a language model of bytes with linear or softmax attention, and say how many bits a byte costs.",
}
