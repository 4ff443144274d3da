"""The site, built into a folder of a test's own, and what its search finds there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from snippets import ROOT

KV, OWN, COMPARED = "how_to/constant_memory.html", "how_to/your_transformer.html", "how_to/compared.html"
SDPA = f"{OWN}#you-call-scaled_dot_product_attention"
QUESTIONS = {
    "which map should I use?": "concepts/maps.html|faq.html#which-map-should-i-use",
    "how many features?": "concepts/maps.html#how-many-features|faq.html#how-many-features-do-i-need",
    "is it causal?": "faq.html#does-it-do-causal-attention",
    "does it handle padding?": "faq.html#how-do-i-handle-padding",
    "my model has sliding windows": "faq.html#my-model-has-sliding-windows-what-happens-to-them",
    "is it faster at my length?": "faq.html#is-it-faster-at-my-length",
    "what is lost?": "faq.html#what-is-lost",
    "GPU": "faq.html#does-it-run-on-a-gpu",
    "how do I save a model?": "faq.html#how-do-i-save-a-model",
    "how do I train a model?": "faq.html#how-do-i-train-a-model|tutorials/train.html",
    "needle": "faq.html#does-a-bounded-cache-pass-needle-retrieval",
    "retrieval": "faq.html#does-a-bounded-cache-pass-needle-retrieval",
    "needle recall": f"faq.html#does-a-bounded-cache-pass-needle-retrieval|{KV}#what-it-costs",
    "KV cache eviction": f"{KV}|{COMPARED}#kvpress",
    "attention sinks": "faq.html#what-is-the-eviction-policy-and-what-of-attention-sinks",
    "quantized KV cache": f"faq.html#to-how-many-bits-is-the-kv-cache-quantized|{COMPARED}#quantizedcache",
    "long context memory": "faq.html#how-much-memory-does-a-long-context-take",
    "out of memory": "faq.html#how-much-memory-does-a-long-context-take",
    "tokens per second": "faq.html#how-fast-is-it-throughput-in-tokens-per-second-prefill-latency",
    "perplexity KL divergence": "faq.html#what-do-perplexity-and-kl-divergence-say",
    "RULER": f"{KV}|{KV}#measure-it-on-your-model",
    "which models work?": "how_to/which_models.html",
    "supported models": "how_to/which_models.html|how_to/which_models.html#decoders",
    "benchmarks": "evidence/benchmarks.html|evidence/benchmarks.html#all-benchmarks",
    "crossover": "faq.html#is-it-faster-at-my-length|evidence/benchmarks.html#crossover-with-exact-attention",
    "vision language model": "faq.html#does-it-work-with-vision-language-models",
    "custom model": "faq.html#does-it-take-my-custom-model|how_to/which_models.html",
    "replace attention in my Transformer": f"{OWN}|faq.html#how-do-i-replace-attention-in-my-own-transformer",
    "attn_mask": f"{SDPA}|faq.html#what-takes-the-place-of-attn_mask-and-dropout_p",
    "QuantizedCache": f"{COMPARED}#quantizedcache",
    "kvpress": f"{COMPARED}#kvpress",
    "flash linear attention": f"{COMPARED}#flash-linear-attention",
    "save and load a cache": f"faq.html#how-do-i-save-and-load-a-cache|{KV}#continue-fork-save",
    "beam search": "faq.html#does-beam-search-work",
    "device_map": "faq.html#transformers-options",
    "bitsandbytes": "faq.html#transformers-options",
    "FlashAttention": f"faq.html#transformers-options|{COMPARED}#sdpa-and-flashattention",
    "prefill_chunk_size": "faq.html#transformers-options",
    "write a feature map": "how_to/custom_map.html",
    "linearize an encoder": "how_to/encoder.html",
    "sentence embeddings": "how_to/encoder.html#sentence-encoders",
    "vLLM": f"{COMPARED}#servers-vllm-sglang-tgi-llamacpp",
    "server": f"{COMPARED}#servers-vllm-sglang-tgi-llamacpp",
    "llama.cpp": f"{COMPARED}#servers-vllm-sglang-tgi-llamacpp",
    "how many megabytes?": "concepts/bytes.html#how-many-megabytes",
    "OOM": KV,
    "quality": f"{KV}#what-it-costs",
    "merged keys": f"{KV}#what-are-merged-keys",
    "window and gate": "how_to/gates.html#a-window-and-a-gate-in-one-layer|how_to/windows.html",
    "gate": "how_to/gates.html|how_to/gates.html#train-a-gated-layer",
    "DNA": f"{OWN}#you-build-a-new-model",
    "RoPE": "how_to/positions.html",
    "GQA": "quickstart.html#linear-attention",
    "long documents": "how_to/encoder.html|how_to/encoder.html#when-does-it-pay",
    "document embeddings": "how_to/encoder.html",
    "convert my model": "tutorials/convert.html",
    "LoRA": "tutorials/convert.html",
    "fine-tune": "tutorials/linearize.html#a-language-model",
    "output_attentions": "tutorials/linearize.html#what-is-replaced-and-what-is-refused",
    "torch.compile": f"{OWN}#torchcompile-autocast-checkpointing",
    "requirements": "install.html",
    "bfloat16": "faq.html#dtypes",
    "float16": "faq.html#dtypes",
    "dtype": "faq.html#dtypes",
    "thread-safe": "faq.html#threads",
    "threads": "faq.html#threads",
    "concurrent requests": f"faq.html#threads|{COMPARED}#servers-vllm-sglang-tgi-llamacpp",
    "StaticCache": "faq.html#transformers-options",
    "speculative decoding": "faq.html#transformers-options|faq.html#does-beam-search-work",
    "PEFT": "faq.html#transformers-options",
    "ONNX": "faq.html#export",
    "export": "faq.html#export",
    "streaming audio": "faq.html#streams",
    "genomes": f"faq.html#streams|{OWN}#you-build-a-new-model",
    "train a gated layer": "how_to/gates.html#train-a-gated-layer",
    "how are errors measured?": "faq.html#what-is-lost",
    "relative error": "faq.html#what-is-lost|concepts/error.html#what-is-not",
    "MLA": "how_to/which_models.html",
    "throughput": "faq.html#how-fast-is-it-throughput-in-tokens-per-second-prefill-latency",
    "prefill": "faq.html#how-fast-is-it-throughput-in-tokens-per-second-prefill-latency|faq.html#transformers-options",
    "TransformerEncoderLayer": f"{OWN}#you-use-torchs-transformer-layers",
    "when not to use it": "faq.html#should-i-use-it",
    "run the tests": "install.html#with-make",
    "offline": "install.html#with-make",
    "No matching distribution found": "faq.html#install|install.html",
    "no module named linattn": "faq.html#install|install.html",
    "how many bits": "faq.html#to-how-many-bits-is-the-kv-cache-quantized|concepts/bytes.html",
    "KIVI": "faq.html#to-how-many-bits-is-the-kv-cache-quantized",
    "TurboQuant": "faq.html#to-how-many-bits-is-the-kv-cache-quantized",
    "2 bits or 4 bits": "faq.html#to-how-many-bits-is-the-kv-cache-quantized",
    "sinks exact": "faq.html#what-is-the-eviction-policy-and-what-of-attention-sinks",
    "first tokens exact": "faq.html#what-is-the-eviction-policy-and-what-of-attention-sinks",
    "eviction at equal bytes": f"faq.html#what-is-the-eviction-policy-and-what-of-attention-sinks|{KV}",
    "recall by depth": "faq.html#does-a-bounded-cache-pass-needle-retrieval",
    "same top token": "faq.html#what-do-perplexity-and-kl-divergence-say",
    "peak working memory": "evidence/benchmarks.html#peak-memory-of-a-call",
    "multi-turn chat": "faq.html#how-do-i-save-and-load-a-cache",
    "what is uniform attention": "faq.html#what-is-lost",
    "per-layer budgets": f"{KV}#per-layer-budgets",
    "standard input": f"{KV}|cli.html#linattn-generate",
    "how large is the state": "concepts/bytes.html#size-of-a-state",
    "nn.MultiheadAttention": f"{OWN}#you-use-torchs-transformer-layers",
    "measure my model": f"{KV}|{KV}#measure-it-on-your-model|evidence/audit.html#measure-your-model",
    "crash resume": "tutorials/train.html|cli.html#linattn-reproduce",
    "license": "index.html",
    "cite": "index.html",
}
"""What a newcomer asks, and the places that answer it, any of which is to be among the first three hits."""


def build(folder: Path) -> str:
    """Build the site into a folder; what the builder says, warnings being errors, which --quiet would not count."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"the site does not build: {ended.stdout}{ended.stderr}")
    return ended.stderr


class Search:
    """The search of the site: the same index, fields, weights and query as those of its pages' script."""

    def __init__(self, site: Path) -> None:
        from lunr.builder import Builder
        from lunr.pipeline import Pipeline
        from lunr.stop_word_filter import stop_word_filter

        found: dict[str, Any] = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
        self.between = between = found["config"]["separator"]
        self.docs = {doc["location"]: doc for doc in found["docs"]}
        builder = Builder()
        builder.ref("location")
        for name, options in found["config"]["fields"].items():
            builder.field(name, options["boost"])
        Pipeline.registered_functions.setdefault("stopWordFilter", stop_word_filter)
        builder.pipeline.add(stop_word_filter)
        for doc in found["docs"]:
            texts = {"title": doc["title"], "text": doc["text"], "tags": " ".join(doc.get("tags", []))}
            words = {name: re.sub(between, " ", re.sub(r"<[^>]+>", " ", text)) for name, text in texts.items()}
            builder.add({"location": doc["location"], **words}, {"boost": doc.get("boost", 1)})
        self.index = builder.build()
        self.words = list(self.index.inverted_index)

    def hits(self, question: str) -> list[str]:
        """Addresses, the best first."""
        words = [word for word in re.split(self.between, question.lower()) if word]
        return [hit["ref"] for hit in self.index.search(" ".join(f"{word}*" for word in words))]
