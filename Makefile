# Two commands matter: `make demo` (set up, audit a real model, measure the claims) and `make test` (set up, all laws).
PYTHON ?= python3
PYTHONS ?= $(PYTHON)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test check fmt bench readme docs release clean

demo: $(VENV)/demo.stamp
	$(BIN)/linattn audit --target 0.1 --out report
	$(BIN)/linattn bench --lengths 512,2048,8192 --repeats 3 --no-memory --out report
	$(BIN)/linattn reproduce --quick --out report

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n 2

check: $(VENV)/dev.stamp
	$(BIN)/ruff format --check --quiet src tests benchmarks docs
	$(BIN)/ruff check --quiet src tests benchmarks docs
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --noconftest tests/test_size.py

fmt: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix --quiet src tests benchmarks docs
	$(BIN)/ruff format --quiet src tests benchmarks docs

readme: $(VENV)/demo.stamp
	$(BIN)/python docs/write_tables.py --take

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
	rm -rf $(VENV) report site dist

# torch first: its pin decides which build everything else is resolved against.
$(VENV)/torch.stamp: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml
	$(PIP) -e '.[demo]'
	touch $@

$(VENV)/docs.stamp: $(VENV)/torch.stamp pyproject.toml
	$(PIP) -e '.[docs]'
	touch $@

$(VENV)/dev.stamp: $(VENV)/demo.stamp
	$(PIP) -e '.[dev]'
	touch $@

$(VENV)/bench.stamp: $(VENV)/demo.stamp
	$(PIP) performer-pytorch==1.1.4 linear-attention-transformer==0.19.1
	touch $@
