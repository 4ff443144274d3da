"""Wrong words on the command line: errors name the option or the file, in our own words, and nothing is left behind."""

from __future__ import annotations

import re
import socket

import pytest
import torch
import transformers
from typer.testing import CliRunner

from linattn.cli.app import app, subcommands

WIDE = {"COLUMNS": "200", "TERM": "dumb"}
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
FEWEST = {
    "audit": "audit BERT --text TEXT --out OUT",
    "audit LM": "audit LM --text TEXT --out OUT",
    "bench": "bench --out OUT",
    "convert": "convert BERT OUT --text TEXT",
    "generate": "generate LM --prompt w1",
    "report": "report OUT",
    "reproduce": "reproduce --out OUT",
    "train": "train OUT --text TEXT",
}
# By command: what is added to its fewest words, and what the error says.
BELONG = (
    "--dtype, --text-kind, --passages, --method, --task, --samples, --plan-out and --calibration belong to --budget"
)
LISTED = ": wanted different positive whole numbers separated by commas, as in "
WRONG = {
    "audit": {
        "--features 0 --map FavorPlus": LISTED,
        "--features 8,8": LISTED,
        "--features x": LISTED + "64,256; got 'x'",
        "--features 7 --map Hyperbolic --tokens 16": "so num_features must be a multiple of 2, got 7",
        "--draws 0": "--draws must be at least 1, got 0",
        "--seed -1": "--seed must be an integer of at least 0, got -1",
        "--tokens 0": LISTED,
        "--tokens 9999": "--tokens must be at least 1 and at most 512",
        "--tokens 2": "--tokens must be at least 8 and the text as long; of",
        "--features 999999999999999999 --map FavorPlus --tokens 16": "there is no such memory, give smaller numbers",
        "--calibration TEXT": BELONG,
        "--plan-out TEXT": BELONG,
        "--full --map Relu": "--full measures all methods and --map only those it names; leave one out",
        "--map Nope": "--map: 'Nope': there is no feature map 'Nope'; write one of Exponential",
        "--map FavorPlus(rows=3)": "those of FavorPlus(num_features, draw, lengths, scale)",
        "--map Relu --map relu": "methods must be one or more, each once; got Relu twice",
        "--map Relu+windy": "--map: 'Relu+windy': 'windy' is no window, did you mean 'window'?",
        "--passages 3": BELONG,
        "--samples 3": BELONG,
        "--dtype bfloat16": BELONG,
        "--tokens many": LISTED,
        "--tokens 8,16": "several numbers of tokens are for --budget, got 8,16; give one",
        "--budget 16": "holds a BertModel, which does not predict a next token; give a causal language model",
    },
    "audit LM": {
        "--budget 0": LISTED,
        "--budget x": LISTED,
        "--budget 16 --tokens 1": "--tokens must be at least 64, got 1",
        "--budget 16 --passages 0": "--passages must be at least 1, got 0",
        "--budget 16 --tokens 600": "give a longer text, fewer --passages or fewer --tokens",
        "--budget 16 --tokens 160 --method nope": "--method must be among 'bounded cache'",
        "--budget 16 --tokens 160 --task nope": "--task must be among facts, niah_single",
        "--budget 16 --tokens 160 --samples 0": "--samples must be at least 1, got 0",
        "--budget 16 --dtype float8": "--dtype must be one of float32, bfloat16; got 'float8'",
        "--budget 16 --map Relu": "--map and --budget are of two audits; leave one out",
        "--budget 16 --full --draws 3": "--full, --draws and --budget are of two audits; leave one out",
        "--budget 16 --seed 1": "--seed and --budget are of two audits; leave one out",
    },
    "bench": {
        "--lengths 0": LISTED,
        "--lengths 8,8": LISTED,
        "--heads 0": "Invalid value for '--heads': Input should be greater than or equal to 1",
        "--head-dim 0": "Invalid value for '--head-dim': Input should be greater than or equal to 1",
        "--batch 0": "Invalid value for '--batch': Input should be greater than or equal to 1",
        "--repeats 0": "Invalid value for '--repeats': Input should be greater than or equal to 1",
        "--seed -1": "Invalid value for '--seed': Input should be greater than or equal to 0",
        "--dtype f": "Invalid value for '--dtype': Value error, 'f' is not one of 'float32', 'bfloat16', 'float16'",
        "--device tpu": "Invalid value for '--device': Value error, 'tpu' is not one of 'cpu', 'cuda'",
        "--map Relu --features 3": "Relu has a width of its own, got features=3; leave the features out",
        "--features 0": "Invalid value for '--features': Input should be greater than or equal to 1",
        "--map Nope": "--map: 'Nope': there is no feature map 'Nope'",
    },
    "convert": {
        "--tokens 0": "Invalid value for '--tokens': Input should be greater than or equal to 1",
        "--tokens 9999": "--tokens is 9999, and BertModel takes at most 512; give fewer",
        "--tokens 512": "wanted 16 or more to calibrate, train and judge on; give longer texts or a smaller num_tokens",
        "--minutes -1": "Invalid value for '--minutes': Input should be greater than or equal to 0",
        "--minutes nan": "Invalid value for '--minutes': Input should be greater than or equal to 0",
        "--map Nope": "--map: 'Nope': there is no feature map 'Nope'",
        "--seed -1": "Invalid value for '--seed': Input should be greater than or equal to 0",
        "--features 0": "Invalid value for '--features': Input should be greater than or equal to 1",
        "--minutes inf": "--minutes must be a finite number >= 0, got inf",
    },
    "generate": {
        "--tokens 0": "Invalid value for '--tokens': Input should be greater than or equal to 1",
        **{
            f"--temperature {value}": "--temperature must be 0 or from 1.18e-38 to 3.4e+38, as float32 has them, "
            f"got {value}"
            for value in ("-1.0", "nan", "inf", "-inf", "1e-300", "1e+300")
        },
        **{
            f"--top-p {value}": f"--top-p must be above 0 and at most 1, got {value}" for value in ("0.0", "2.0", "nan")
        },
        "--seed -1": "Invalid value for '--seed': Input should be greater than or equal to 0",
        **{
            f"--budget {value}": "Invalid value for '--budget': Input should be" for value in (-1, 0, 2**20 + 1, 10**18)
        },
        "--tokens 1025": "the model has 1024 positions, prompt and --tokens are 1026 together; give fewer",
        "--budget 1": "--budget: a budget of 1 keys is too small for keys of width",
        "--budget 99 --bits 9": "--bits must be from 2 to 8, or 32, got 9",
        "--bits 4": "are of a bounded cache; give --budget too",
        "--prompt ''": "the prompt gives no token; give a text",
    },
    "report": {"": "holds none of audit.jsonl, memory.jsonl, claims.jsonl, bench.jsonl; name the folder"},
    "reproduce": {"nope": "no claim is called nope; `linattn reproduce --list` names them all"},
    "train": {
        "--context 0": "Invalid value for '--context': Input should be greater than or equal to 1",
        "--batch 0": "Invalid value for '--batch': Input should be greater than or equal to 1",
        "--minutes 0": "--minutes must be a finite number > 0, got 0.0",
        "--minutes nan": "--minutes must be a finite number > 0, got nan",
        "--learning-rate inf": "--learning-rate must be a finite number > 0, got inf",
        "--dropout nan": "--dropout must be from 0 to below 1, got nan",
        "--layers 999999999999999999": "there is no such memory, give smaller numbers",
        "--width 800000000000000000": "there is no such memory, give smaller numbers",
        "--steps 0": "Invalid value for '--steps': Input should be greater than or equal to 1",
        "--learning-rate -1": "--learning-rate must be a finite number > 0, got -1.0",
        "--redraw 0": "Invalid value for '--redraw': Input should be greater than or equal to 1",
        "--layers 0": "Invalid value for '--layers': Input should be greater than or equal to 1",
        "--width 0": "Invalid value for '--width': Input should be greater than or equal to 1",
        "--width 30": "--width must be a multiple of --heads, got 30 and 4",
        "--width 12": "got an odd head_dim=3",
        "--heads 0": "Invalid value for '--heads': Input should be greater than or equal to 1",
        "--hidden 0": "Invalid value for '--hidden': Input should be greater than or equal to 1",
        "--dropout 2": "--dropout must be from 0 to below 1, got 2.0",
        "--features 0": "Invalid value for '--features': Input should be greater than or equal to 1",
        "--pattern x": "--pattern must be letters",
        "--gated x": "--gated must be kinds of the pattern's blocks",
        "--gate x": "gate='x' is no written form; write one of ForgetGate",
        "--positions x": "positions='x' is no written form; write one of Rotary",
        "--map x": "there is no feature map 'x'",
        "--seed -1": "Invalid value for '--seed': Input should be greater than or equal to 0",
        "": "wanted more than context=4096; give more text, or a shorter context",
    },
}
CASES = [(command, words, message) for command, found in WRONG.items() for words, message in found.items()]
FILES = {
    "audit MISSING": "is not a folder and not a GGUF file; give a folder with a saved model, or a Hugging Face name",
    "audit EMPTY": "holds no model, neither a config.json nor a GGUF file",
    "audit BARE": "holds a model and no tokenizer; save the model's tokenizer into the folder",
    "audit BERT --text MISSING": "there is no text file",
    "audit BERT --text BLANK": "holds no text; give a file with at least a few sentences",
    "audit no-one/none": "not in the local cache of the Hugging Face hub, which cannot be reached; give a folder",
    "convert BARE OUT": "holds a model and no tokenizer; save the model's tokenizer into the folder",
    "convert BERT TEXT": "exists and is not an empty folder; give a new folder, or remove it first",
    "convert no-one/none OUT": "not in the local cache of the Hugging Face hub, which cannot be reached; give a folder",
    "generate BARE --prompt w1": "holds a model and no tokenizer; save the model's tokenizer into the folder",
    "generate BERT --prompt w1": "which does not predict a next token; give a causal language model",
    "generate no-one/none --prompt w1": "not in the local cache of the Hugging Face hub, which cannot be reached",
    "report MISSING": "holds none of audit.jsonl",
    "train OUT --text MISSING": "there is no file or folder",
}
UNKNOWN = ("bench --bogus", "train", "convert MODEL", "generate X", "nope")


@pytest.fixture(scope="module")
def places(folder, tmp_path_factory):
    """Models and texts by their names above."""
    made = tmp_path_factory.mktemp("places")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4)
    transformers.GPT2LMHeadModel(config).save_pretrained(made / "lm")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (made / "lm" / name).write_bytes((folder("bert") / name).read_bytes())
    transformers.BertModel(transformers.BertConfig(vocab_size=9, **SIZES)).save_pretrained(made / "bare")
    (made / "empty").mkdir()
    for name, content in (("text", "w1 w2 w3 " * 70), ("short", "w1 w2"), ("blank", " ")):
        (made / f"{name}.txt").write_text(content, encoding="utf-8")
    found = {name.upper(): str(made / f"{name}.txt") for name in ("text", "short", "blank")}
    found |= {name.upper(): str(made / name) for name in ("lm", "bare", "empty", "missing")}
    return found | {"BERT": str(folder("bert"))}


@pytest.fixture
def refused(places, tmp_path, monkeypatch):
    """A function that runs words, places named by capitals, and gives the error; nothing may be left behind."""

    def no_network(*_, **__):
        raise OSError("no network in this test")

    for owner, name in ((socket.socket, "connect"), (socket, "getaddrinfo"), (socket, "create_connection")):
        monkeypatch.setattr(owner, name, no_network)

    def run(*words):
        known = {**places, "OUT": str(tmp_path / "out"), "''": ""}
        result = CliRunner(env=WIDE).invoke(app, [known.get(word, word) for word in words])
        assert result.exit_code in (1, 2), result.output
        assert isinstance(result.exception, SystemExit), result.exception
        assert not (tmp_path / "out").exists()
        # The prompt is not printed before all is known.
        assert words[0] != "generate" or result.stdout == ""
        found = result.stderr.strip().splitlines()[-1]
        # What is wrong whatever the files hold is a usage error.
        assert found.startswith(f"linattn {words[0]}: " if result.exit_code == 1 else "Error: ")
        return found

    return run


def test_every_command_is_here():
    assert {name.split()[0] for name in WRONG} == set(subcommands())


@pytest.mark.parametrize(("command", "words", "message"), CASES)
def test_an_error_names_the_option(refused, command, words, message):
    assert message in refused(*FEWEST[command].split(), *words.split())


@pytest.mark.parametrize(("words", "message"), FILES.items())
def test_an_error_names_the_file(refused, words, message):
    assert message in refused(*words.split())


@pytest.mark.parametrize("words", UNKNOWN)
def test_words_that_no_command_has(words):
    result = CliRunner(env=WIDE).invoke(app, words.split())
    assert result.exit_code == 2
    kinds = "Invalid value: give one of|No such option|Missing (argument|option|parameter)|No such command"
    assert re.search(f"Error: ({kinds})", result.stderr)


@pytest.mark.parametrize(
    "words",
    ["audit --draws", "bench --heads", "convert M OUT --seed", "generate M --prompt x --tokens", "train OUT --seed"],
)
@pytest.mark.parametrize("number", [2**63, 10**30])
def test_whole_numbers_beyond_torchs(words, number):
    result = CliRunner(env=WIDE).invoke(app, [*words.split(), str(number)])
    assert result.exit_code == 2
    option = words.split()[-1]
    assert f"Error: Invalid value for '{option}': {number} is beyond {2**63 - 1} in size." in result.stderr
