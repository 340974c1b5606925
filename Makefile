# Every target makes the environment it needs; only Python 3.11+ and a package index are required.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
DOCS := .venv-docs
# Tiny models are faster on one thread: starting two takes longer than their matrices.
TEST := OMP_NUM_THREADS=1
PIP := python -m pip install --disable-pip-version-check --quiet

.PHONY: help demo test check format docs test-oldest fuzz stress clean

help:
	@echo "make demo         answer six prompts with plain generate and with lade, and compare speed"
	@echo "make test         run all tests, the pool's also without compilation"
	@echo "make check        format, lint and strict types"
	@echo "make format       bring the code into the format that check wants"
	@echo "make docs         build the documentation site in docs/_build"
	@echo "make test-oldest  run the tests of lade on the oldest supported transformers"
	@echo "make fuzz         compare 20 000 random calls with plain generate (about half an hour)"
	@echo "make stress       interrupt calls, and call from threads, some ten thousand times (an hour)"
	@echo "make clean        remove the environments and caches"

demo: $(VENV)/.demo
	$(VENV)/bin/lade demo

test: $(VENV)/.dev
	$(TEST) $(VENV)/bin/python -m pytest
	NUMBA_DISABLE_JIT=1 $(VENV)/bin/python -m pytest tests/ngram_pool

check: $(VENV)/.dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

format: $(VENV)/.dev
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

# Strict: a broken reference, a missing page or a figure that differs from its results ends it.
docs: $(DOCS)/.docs
	$(DOCS)/bin/python docs/figures.py --check
	$(DOCS)/bin/python -m sphinx -W --keep-going -b dirhtml docs docs/_build
	@echo "open docs/_build/index.html"

# A cache of its own: two releases of Numba overwrite each other's compiled code, at every start.
test-oldest: $(OLDEST)/.dev
	$(TEST) NUMBA_CACHE_DIR=$(CURDIR)/$(OLDEST)/numba $(OLDEST)/bin/python -m pytest tests/lade

fuzz: $(VENV)/.dev
	$(VENV)/bin/python -m tests.fuzz --cases 20000 --processes 2 --seed 0 --out docs/results/fuzz.json

stress: $(VENV)/.dev
	$(TEST) $(VENV)/bin/python -m tests.stress lines --out docs/results/stress.json
	$(TEST) $(VENV)/bin/python -m tests.stress interrupts --out docs/results/stress.json
	$(TEST) $(VENV)/bin/python -m tests.stress async --out docs/results/stress.json
	for kind in gemma2 flash sdpa; do $(TEST) $(VENV)/bin/python -m tests.stress threads \
		--kind $$kind --out docs/results/stress.json || exit 1; done

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(VENV)/bin/$(PIP) --constraint constraints.txt --editable ".[cli]"
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(VENV)/bin/$(PIP) --constraint constraints.txt --editable ".[dev]"
	@touch $@

$(OLDEST)/.dev: pyproject.toml constraints-oldest.txt | $(OLDEST)/bin/python
	$(OLDEST)/bin/$(PIP) --constraint constraints-oldest.txt --editable ".[dev]"
	@touch $@

$(DOCS)/.docs: pyproject.toml constraints.txt | $(DOCS)/bin/python
	$(DOCS)/bin/$(PIP) --constraint constraints.txt --editable ".[docs]"
	@touch $@

%/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lade needs Python 3.11 or newer; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $*

clean:
	rm -rf $(VENV) $(OLDEST) $(DOCS) docs/_build build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
