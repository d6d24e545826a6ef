# `make test` and `make headroom` set up .venv first; a second run reuses it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Another torch build: make TORCH_INDEX=URL-of-a-package-index TORCH="torch==2.13.0+cu130" test
TORCH_INDEX ?=
TORCH ?=
# What to install with gradwire: an extra of pyproject.toml.
EXTRA ?= dev
FRAMEWORKS_VENV ?= .venv-frameworks
# Test processes, one file each. Ranks often wait for each other, so four keep two cores busy.
WORKERS ?= 4
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help test test-full test-gpu test-browser test-frameworks test-torch test-wheel lint types kernels headroom bench docs clean

help:
	@echo "make test          set up .venv, lint, type-check, run the tests"
	@echo "make headroom      set up .venv, measure what communication costs on two local ranks"
	@echo "make test-full     the tests, with every combination of the invariant matrix"
	@echo "make test-browser  test the report page in a headless Chromium"
	@echo "make test-frameworks  test with Lightning, Accelerate, Transformers, Ray and torchft, in a .venv of their own"
	@echo "make test-gpu      test on this machine's GPU, with this machine's Python"
	@echo "make test-torch    test on another torch: make test-torch TORCH=2.6.0 [PYTHON=python3.12]"
	@echo "make test-wheel    build the wheel, install it elsewhere, and use it; run the notebook"
	@echo "make docs          build the documentation in docs/_build/html"
	@echo "make bench         time kernels against a copy, and steps against DDP and torch's hooks"
	@echo "make clean         remove .venv and caches"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10), "gradwire needs Python 3.10 or later"'
	@$(PYTHON) -m venv $(VENV) || { echo "No venv module: on Debian, apt install python3-venv"; exit 1; }

# Install torch first, from TORCH_INDEX if it is given; everything else uses that torch.
$(VENV)/torch: constraints.txt | $(BIN)/python
	@echo "installing torch ..."
	@$(PIP_INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(if $(TORCH),$(TORCH),-c constraints.txt torch)
	@touch $@

$(VENV)/installed: pyproject.toml constraints.txt $(VENV)/torch
	@echo "installing gradwire ..."
	@$(PIP_INSTALL) $(if $(TORCH),,-c constraints.txt) -e '.[$(EXTRA)]'
	@touch $@

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	$(BIN)/mypy

# Compile the CPU kernels, which takes half a minute in a new clone. Each test process would compile them all.
kernels: $(VENV)/installed
	@$(BIN)/python -c 'import torch, typing; from gradwire.ops import Family, warm_up; \
		warm_up(torch.device("cpu"), typing.get_args(Family))'

test: $(VENV)/installed
	@$(MAKE) --no-print-directory -j2 --output-sync lint types kernels
	$(BIN)/python -m pytest -m "not full and not browser" -n $(WORKERS) --dist loadfile

test-full: lint types
	$(BIN)/python -m pytest -m "not browser"

# Needs Chromium: on Debian, apt install chromium.
test-browser: $(VENV)/installed
	$(BIN)/python -m pytest -m browser tests/browser

test-frameworks:
	@$(MAKE) --no-print-directory VENV=$(FRAMEWORKS_VENV) EXTRA=frameworks $(FRAMEWORKS_VENV)/installed
	$(FRAMEWORKS_VENV)/bin/python -m pytest -m "not full" -n 2 --dist loadfile tests/frameworks

# Uses the torch of the GPU machine, whose build fits its driver, instead of a .venv.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m tests.gpu.run

# The tests of the core, on a torch of your choice, in a .venv of its own that is kept. Builds for CUDA take 5 GB.
# With NumPy 2.4 the interpreter of an older Triton fails.
TORCH_VENV = .venv-torch-$(TORCH)
CORE_TESTS = attach codecs ddp_comm_hooks errors hook_groups low_rank low_rank_kernels low_rank_memory matrix \
	powersgd_hook precision raw_hooks resume resume_elsewhere torch_private user_hooks
test-torch:
	@test -n "$(TORCH)" || { echo "Say which: make test-torch TORCH=2.6.0"; exit 2; }
	@test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	@$(TORCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		$(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH)
	@$(TORCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		torch==$(TORCH) -e . hypothesis pytest pytest-xdist "numpy<2.4"
	$(TORCH_VENV)/bin/python -m pytest -m "not full and not browser" -n $(WORKERS) --dist loadfile \
		$(CORE_TESTS:%=tests/test_%.py)

test-wheel: $(VENV)/installed
	$(BIN)/python -m pytest -m full tests/test_wheel.py tests/test_notebook.py

$(VENV)/docs: pyproject.toml constraints.txt $(VENV)/installed
	@$(PIP_INSTALL) $(if $(TORCH),,-c constraints.txt) -e '.[docs]'
	@touch $@

# Warnings are errors: a page that nobody links to, a link without a target, a name that is gone.
docs: $(VENV)/docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -q -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

headroom: $(VENV)/installed
	$(BIN)/gradwire headroom --json headroom.json --html headroom.html

bench: $(VENV)/installed
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/steps.py --averaging

clean:
	rm -rf $(VENV) $(FRAMEWORKS_VENV) .venv-torch-* docs/_build .mypy_cache .ruff_cache .pytest_cache
