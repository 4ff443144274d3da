"""The command `linattn generate`, from the words of the command line to text."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest
import torch
from rich.progress import Progress
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from gguf_models import MERGES, TOKENS, tiny, write_gguf
from linattn.cli.app import app
from linattn.cli.generation import _throughput, divergence_in_words
from linattn.hf import (
    BoundedCache,
    ByteTokenizer,
    LinearLMConfig,
    LinearLMForCausalLM,
    linearize_,
    load_language_model,
    save_pretrained,
)
from linattn.kv_cache.layer_plans import PLAIN, MemoryPlan, write_memory_plans
from programs import TRANSFORMERS

WIDE = {"COLUMNS": "200", "TERM": "dumb"}
TOLD = (
    r"(\d+) tokens read and the first written after [\d.]+ s, (\d+) written"
    r"(?:, [\d,.]+ tokens/s in the median \(10 to 90 %: [\d,.]+ to [\d,.]+\))?; the cache holds ([\d,]+) bytes"
)


def run(*words):
    return CliRunner(env=WIDE).invoke(app, ["generate", *(str(word) for word in words)])


def told(result) -> list[int]:
    """Tokens read, tokens written, bytes of the cache."""
    found = re.search(TOLD, result.stderr)
    return [int(number.replace(",", "")) for number in found.groups()]


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory):
    """A folder with a model of bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    torch.manual_seed(0)
    LinearLMForCausalLM(LinearLMConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2)).save_pretrained(
        folder
    )
    return folder


@pytest.fixture(scope="module")
def of_tokens(tmp_path_factory):
    """A folder with a softmax model and a byte-level tokenizer, many of whose tokens are no whole characters."""
    folder = tmp_path_factory.mktemp("tokens")
    model = tiny()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    vocabulary = {token: number for number, token in enumerate(TOKENS)}
    fast = Tokenizer(models.BPE(vocabulary, [tuple(merge.split()) for merge in MERGES]))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=TOKENS[-1]).save_pretrained(folder)
    return folder


def own(model, ids, **options):
    """What transformers' generate goes on with."""
    made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **options)
    return made[0, ids.shape[1] :].tolist()


def test_a_model_of_bytes(of_bytes):
    first, again, other = (
        run(of_bytes, "--prompt", "7 böttles", "--tokens", "60", "--seed", seed) for seed in (1, 1, 2)
    )
    assert first.exit_code == 0, first.output
    assert first.stdout.startswith("7 böttles")
    # Bytes that are no UTF-8 are shown as one sign or more.
    assert len("7 böttles") < len(first.stdout.rstrip("\n")) <= len("7 böttles") + 60
    assert (first.stdout, first.stdout != other.stdout) == (again.stdout, True)
    assert told(first)[:2] == [len("7 böttles".encode()), 60]
    # Bars are for terminals.
    assert "Reading" not in first.stderr
    expected = own(LinearLMForCausalLM.from_pretrained(of_bytes).eval(), torch.tensor([list(b"7")]), max_new_tokens=20)
    greedy = run(of_bytes, "--prompt", "7", "--tokens", "20", "--temperature", "0")
    assert greedy.stdout == "7" + bytes(expected).decode("utf-8", "replace") + "\n"


def test_any_language_model(of_tokens):
    loaded = load_language_model(of_tokens)
    ids = loaded.tokenizer("the ärger", return_tensors="pt")["input_ids"]
    expected = own(loaded.model, ids, max_new_tokens=40)
    result = run(of_tokens, "--prompt", "the ärger", "--tokens", "40", "--temperature", "0")
    assert result.exit_code == 0, result.output
    assert result.stdout == "the ärger" + loaded.tokenizer.decode(expected) + "\n"
    # Two layers, keys and values, two heads of width 8 in float32; the last token is drawn and not read.
    assert told(result) == [ids.shape[1], 40, 2 * 2 * 2 * 8 * 4 * (ids.shape[1] + 40 - 1)]


def test_a_linearized_folder_in_constant_memory(of_tokens, tmp_path):
    loaded = load_language_model(of_tokens)
    linearize_(loaded.model, method="FavorPlus(num_features=16)")
    save_pretrained(loaded.model, tmp_path / "linear", tokenizer=loaded.tokenizer)
    ids = loaded.tokenizer("the", return_tensors="pt")["input_ids"]
    expected = loaded.tokenizer.decode(own(loaded.model, ids, max_new_tokens=30))
    results = [
        run(tmp_path / "linear", "--prompt", "the", "--tokens", tokens, "--temperature", "0") for tokens in (5, 30)
    ]
    assert results[1].stdout == f"the{expected}\n"
    assert told(results[0])[2] == told(results[1])[2]
    save_pretrained(loaded.model, tmp_path / "silent")
    refused = run(tmp_path / "silent", "--prompt", "the")
    assert refused.exit_code == 1
    assert "save_pretrained(model, folder, tokenizer=tokenizer)" in refused.stderr


@pytest.mark.skipif(find_spec("gguf") is None, reason="no reader of GGUF: pip install 'linattn[gguf]'")
def test_a_gguf_file(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", tiny())
    result = run(tmp_path / "tiny.gguf", "--prompt", "the", "--tokens", "5")
    assert result.exit_code == 0, result.output
    assert told(result)[1] <= 5


def test_the_models_own_end(of_tokens, tmp_path):
    loaded = load_language_model(of_tokens)
    ids = loaded.tokenizer("the", return_tensors="pt")["input_ids"]
    tokens = own(loaded.model, ids, max_new_tokens=8)
    loaded.model.generation_config.eos_token_id = [TOKENS.index("!"), tokens[5]]
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    result = run(tmp_path, "--prompt", "the", "--tokens", "40", "--temperature", "0")
    written = tokens[: tokens.index(tokens[5])]
    assert result.stdout == "the" + loaded.tokenizer.decode(written) + "\n"
    assert told(result)[1] == len(written)


def test_refusals(tmp_path, folder):
    result = run(tmp_path / "none", "--prompt", "a")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "is not a folder and not a GGUF file" in result.stderr
    result = run(tmp_path / "none", "--prompt", "\udcff")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--prompt is no text in UTF-8" in result.stderr
    config = LinearLMConfig(num_hidden_layers=1, positions="LearnedCodes(code_dim=4, max_length=8)")
    LinearLMForCausalLM(config).save_pretrained(tmp_path / "short")
    result = run(tmp_path / "short", "--prompt", "hello", "--tokens", "10")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "the model has 8 positions, prompt and --tokens are 15 together; give fewer" in result.stderr
    for family, kind in (("bert", "BertModel"), ("llama", "LlamaModel")):
        result = run(folder(family), "--prompt", "a")
        assert (result.exit_code, result.stdout) == (1, "")
        assert f"holds a {kind}, which does not predict a next token" in result.stderr


BESIDE = (
    r"1 global layers by sinks \d \+ window \d+(?: \+ \d+ in [46] bits)* \+ merged \d+(?: in 4 bits)?: "
    r"they keep at most "
    r"([\d,]+) bytes, ([\d,]+) after ([\d,]+) tokens; "
    r"the full cache keeps ([\d,]+) bytes in these layers"
)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A folder with a model of bytes, one of whose two layers attends to all tokens."""
    folder = tmp_path_factory.mktemp("hybrid")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    kinds = ["sliding_attention", "full_attention"]
    # Logits apart from each other, as those of a trained model are.
    sizes |= {"initializer_range": 0.5}
    config = Gemma3TextConfig(
        vocab_size=256, head_dim=8, num_hidden_layers=2, layer_types=kinds, sliding_window=8, eos_token_id=None, **sizes
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    ByteTokenizer().save_pretrained(folder)
    return folder


def test_a_budget_bounds_the_cache_and_is_told_beside_the_exact_one(hybrid):
    found = {}
    for number in (30, 150):
        result = run(hybrid, "--prompt", "abc", "--tokens", number, "--temperature", "0", "--budget", "40")
        assert result.exit_code == 0, result.stderr
        beside = re.search(BESIDE, " ".join(result.stderr.split()))
        found[number] = [told(result)[2], *(int(x.replace(",", "")) for x in beside.groups())]
    held, most, kept, length, exactly = found[150]
    # The last token is drawn and not read.
    assert (length, exactly) == (152, 152 * 64)
    assert most <= 40 * 64
    assert kept == most
    # A window of 8 keeps 7 keys, and its width as one number of 8 bytes; a block may have just begun.
    assert held <= most + 7 * 64 + 8
    assert found[30][1] == most


def test_a_budget_in_few_bits_holds_more_keys_in_no_more_bytes(hybrid):
    words = (hybrid, "--prompt", "abc", "--tokens", 90, "--temperature", "0", "--budget", "40")
    merged = []
    for bits in (("--bits", "32"), ()):
        result = run(*words, *bits)
        assert result.exit_code == 0, result.stderr
        said = " ".join(result.stderr.split())
        assert int(re.search(BESIDE, said)[1].replace(",", "")) <= 40 * 64
        # Of the tier, where there is one, and of the merged keys.
        merged.append(sum(map(int, re.findall(r"(?:\+ |merged )(\d+)(?= in 4 bits|:)", said))))
    assert "in 4 bits: they keep" in said
    assert merged[1] > 1.5 * merged[0]


def planned(labels, layers=(1,), budget=40):
    """A plan of a file."""
    names = [PLAIN if label.startswith("sinks") else "merged keys in 8 bits" for label in labels]
    budgets = [budget] * len(labels)
    return MemoryPlan("m", budget, 99, "t", "0", list(layers), names, budgets, list(labels), 0.1, 0.2, [])


def test_a_budget_is_bounded_as_planned(hybrid, tmp_path):
    label = "window 4 + merged 9 in 8 bits"
    write_memory_plans(tmp_path / "plans", [planned([label]), planned(["sinks 4 + window 56"], budget=60)])
    words = (hybrid, "--prompt", "abc", "--tokens", 9, "--temperature", "0", "--plan", tmp_path / "plans")
    result = run(*words, "--budget", "40")
    assert result.exit_code == 0, result.stderr
    said = " ".join(result.stderr.split())
    assert f"1 global layers by {label}: they keep at most" in said
    assert "by the plan, KL divergence from the full cache 0.1 nats a token at 99 tokens; sinks and a window" in said
    write_memory_plans(tmp_path / "other", [planned([label] * 2, layers=(0, 1))])
    for more, says in (
        (("--budget", "50"), "has plans of 40, 60 keys, got a budget of 50"),
        (("--budget", "60"), "nothing better by a margin than sinks 4 + window 56"),
        (("--budget", "40", "--plan", tmp_path / "other"), "whose global layers are [0, 1], and Gemma3"),
    ):
        refused = run(*words, *more)
        assert refused.exit_code == 1
        assert says in " ".join(refused.stderr.split())
    (tmp_path / "none").write_text("{}", encoding="utf-8")
    # Before a model is loaded.
    refused = run("MODEL", *words[1:], "--budget", "40", "--plan", tmp_path / "none")
    assert "none is not a linattn memory plan" in " ".join(refused.stderr.split())


def test_a_budget_of_all_tokens_writes_the_exact_text(hybrid):
    words = (hybrid, "--prompt", "abc", "--tokens", "20", "--temperature", "0")
    exact, bounded = run(*words), run(*words, "--budget", "200")
    assert bounded.stdout_bytes == exact.stdout_bytes


def test_a_budget_that_the_moments_use_up(hybrid, of_bytes):
    result = run(hybrid, "--prompt", "abc", "--budget", "3")
    assert result.exit_code == 1
    assert "give a budget of" in " ".join(result.stderr.split())
    result = run(of_bytes, "--prompt", "abc", "--budget", "30")
    assert result.exit_code == 1


TEXT = "the number of bytes that are read is the number of bytes that were written, and no other. " * 2


def test_a_prompt_from_a_file_or_the_standard_input_is_not_printed(of_bytes, tmp_path):
    (tmp_path / "prompt.txt").write_text("7 böttles\n", encoding="utf-8")
    words = (of_bytes, "--tokens", "20", "--temperature", "0")
    whole = run(*words, "--prompt", "7 böttles")
    from_file = run(*words, "--prompt-file", tmp_path / "prompt.txt")
    line = ["generate", *map(str, words), "--prompt-file", "-"]
    piped = CliRunner(env=WIDE).invoke(app, line, input="7 böttles\n".encode())
    # Some programs put a mark before UTF-8, which is no part of a text; and end lines by two characters.
    (tmp_path / "marked.txt").write_bytes("\ufeff7 böttles\r\n".encode())
    marked = run(*words, "--prompt-file", tmp_path / "marked.txt")
    for result in (from_file, piped, marked):
        assert result.exit_code == 0, result.output
        assert "7 böttles" + result.stdout == whole.stdout
        assert told(result) == told(whole)
    (tmp_path / "latin.txt").write_bytes("7 böttles".encode("latin-1"))
    refused = run(*words, "--prompt-file", tmp_path / "latin.txt")
    assert refused.exit_code == 1
    assert "--prompt-file: save the text in UTF-8: 'utf-8' codec can't decode" in refused.stderr


# Beside other programs that are forked after transformers has been imported.
@pytest.mark.xdist_group("transformers")
@pytest.mark.parametrize("closed", ["stdin", "stdout", "stderr"])
def test_streams_that_the_caller_has_closed(run_program, of_bytes, closed):
    """A prompt from a closed input is an empty one, and what goes to a closed output is dropped."""
    program = f"import sys; sys.{closed} = None; from linattn.cli import main; main()"
    prompt = ("--prompt-file", "-") if closed == "stdin" else ("--prompt", "a")
    done = run_program(program, "generate", str(of_bytes), "--tokens", "2", *prompt, after=TRANSFORMERS)
    assert (done.returncode, "Traceback" in done.stderr) == (closed == "stdin", False)
    assert ("the prompt gives no token; give a text" in done.stderr) == (closed == "stdin")
    assert done.stdout.startswith("a") == (closed == "stderr")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "give one of --prompt TEXT and --prompt-file FILE"),
        (("--prompt", "a", "--prompt-file", "-"), "give one of --prompt TEXT and --prompt-file FILE"),
        (("--prompt-file", "nowhere"), "'nowhere'"),
        (("--prompt", "a", "--recall", "near"), "are of a bounded cache; give --budget too"),
        (("--prompt", "a", "--measure"), "are of a bounded cache; give --budget too"),
        (("--prompt", "a", "--plan", "p", "--budget", "9", "--recall", "far"), "give no --bits and no --recall"),
        (("--prompt", "a", "--plan", "p", "--budget", "9", "--bits", "4"), "give no --bits and no --recall"),
        (("--prompt", "a", "--plan", "nowhere", "--budget", "9"), "--plan: there is no file nowhere"),
        (("--prompt", "a", "--budget", "9", "--recall", "all"), "'near', 'middle', 'far'"),
        (("--prompt", "a", "--budget", "9", "--recall", "far", "--bits", "4"), "--recall far has bits of its own"),
    ],
)
def test_options_that_do_not_go_together(words, says):
    result = run("MODEL", *words)
    assert result.exit_code == 2
    assert says in result.stderr


@pytest.mark.parametrize(("recall", "number"), [("near", 90), ("middle", 90), ("far", 90), ("near", 1)])
def test_every_token_is_held_or_merged_and_said_so(hybrid, recall, number):
    words = ("--prompt", TEXT, "--tokens", number, "--temperature", "0", "--budget", "60", "--recall", recall)
    result = run(hybrid, *words)
    assert result.exit_code == 0, result.stderr
    said = " ".join(result.stderr.split())
    held = re.search(
        r"of (\d+) tokens (\d+) exact((?:, \d+ in [\d.]+ bits)*), (?:(\d+) merged into (\d+) keys|none)", said
    )
    total, exact, merged, keys = (int(held[place] or 0) for place in (1, 2, 4, 5))
    tiers = {bits: int(number) for number, bits in re.findall(r"(\d+) in ([\d.]+) bits", held[3])}
    assert total == len(TEXT) + number - 1 == exact + sum(tiers.values()) + merged
    assert keys <= merged
    # Of what was said long ago more tokens fit in fewer bits.
    assert ("3" in tiers) == (recall == "far")
    assert "--measure says the KL divergence from the full cache, in about" in said


def test_the_divergence_is_measured_where_it_is_asked_for(hybrid):
    words = (hybrid, "--prompt", TEXT, "--tokens", "9", "--temperature", "0", "--measure", "--bits", "32", "--budget")
    measured = {}
    for budget in ("30", "400"):
        result = run(*words, budget)
        assert result.exit_code == 0, result.stderr
        found = re.search(
            r"KL divergence from the full cache ([-\de.]+) ± [-\de.]+ nats a token over the last 64 tokens of the "
            r"prompt, measured in [\d.]+ s",
            " ".join(result.stderr.split()),
        )
        measured[budget] = abs(float(found[1]))
        assert told(result)[0] == len(TEXT)
    # All tokens fit, and nothing is quantized yet: 256 roundings of float32.
    assert measured["400"] < 256 * 2**-24 < measured["30"]
    assert run(*words, "400").stdout == run(hybrid, "--prompt", TEXT, "--tokens", "9", "--temperature", "0").stdout
    short = run(hybrid, "--prompt", "a", "--budget", "30", "--measure")
    assert (short.exit_code, "give a longer prompt" in short.stderr) == (1, True)


def test_the_measured_divergence_is_that_of_both_predictions(hybrid):
    loaded = load_language_model(hybrid)
    tokens = loaded.tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :-1]
    rows = {}
    for name, cache in (("full", None), ("bounded", BoundedCache(loaded.model, 30))):
        with torch.no_grad():
            head = loaded.model(tokens[:, :-64], past_key_values=cache, use_cache=True).past_key_values
            rows[name] = loaded.model(tokens[:, -64:], past_key_values=head).logits[0].double().softmax(-1)
    mean = (rows["full"] * (rows["full"] / rows["bounded"]).log()).sum(-1).mean()
    result = run(hybrid, "--prompt", TEXT, "--tokens", "1", "--measure", "--budget", "30")
    said = float(re.search(r"full cache ([-\de.]+) ±", " ".join(result.stderr.split()))[1])
    # Three digits, and 256 roundings of float32.
    assert said == pytest.approx(mean.item(), rel=5e-3, abs=256 * 2**-24)


def test_a_terminal_has_a_bar_while_the_prompt_is_read(hybrid, monkeypatch):
    shown = []
    monkeypatch.setattr(Progress, "add_task", lambda self, words, total: shown.append((words, total)) or 0)
    monkeypatch.setattr(Progress, "update", lambda self, task, completed: shown.append(completed))
    result = run(hybrid, "--prompt", TEXT, "--tokens", "2", "--budget", "60", "--measure")
    assert result.exit_code == 0, result.stderr
    each = [("Reading the prompt", len(TEXT)), len(TEXT) - 65]
    assert shown == [
        ("Reading the prompt with the full cache", len(TEXT)),
        each[1],
        *each,
        ("Reading the prompt", 1),
        1,
    ]


def test_figures_in_words_by_hand():
    assert _throughput([0.0, 0.1, 0.3, 0.4]) == "10.0 tokens/s in the median (10 to 90 %: 5.6 to 10.0)"
    even, sure = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[1.0, 0.0]]).log()
    assert divergence_in_words(even, sure, 2.0) == (
        "KL divergence from the full cache 0.693 nats a token over the last 1 tokens of the prompt, measured in 2.0 s"
    )
