# Every target sets itself up: a fresh checkout needs GNU make and Python 3.11 or newer, nothing else.
PYTHON ?= python3.11
VENV ?= .venv
PROFILE ?= auto
ARGS ?=
PYTEST_ARGS ?=

PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PIP := $(PY) -m pip --disable-pip-version-check install --quiet

.DEFAULT_GOAL := help
.PHONY: help setup test lint format reproduce-fig1 study simulate fetch figures report verify-lossless bench-cpu bench-gpu bench-kernels quality check clean upload

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv with the pinned packages; does nothing when they are in place

# The stamp is written last, so an interrupted install is taken up again.
$(STAMP): requirements.lock requirements-embedded.txt requirements-interpreter.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "setup: '$(PYTHON)' is not Python 3.11 or newer; name one, e.g.: make setup PYTHON=/path/to/python3.11" >&2; \
		exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "Installing the pinned packages into $(VENV) (some minutes) ..."
	@$(PIP) -r requirements.lock
	@$(PIP) --no-deps -r requirements-embedded.txt
	@$(PY) -c 'import triton' 2>/dev/null || $(PIP) --no-deps -r requirements-interpreter.txt
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

test: setup ## Run the CPU tests; PYTEST_ARGS="-k pages", PYTEST_ARGS="-m gpu" on a GPU machine
	@$(PY) -m pytest $(PYTEST_ARGS)

lint: setup ## Check style, types and the import rules
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports

format: setup ## Format the code and apply safe fixes
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

reproduce-fig1: setup ## Measure and draw figure 1; PROFILE=auto picks what this machine can run, ARGS="..." adds overrides
	@$(PY) -m experiments.fig1 profile=$(PROFILE) $(ARGS)

study: setup ## Run an experiment of the paper: NAME=draft_length PROFILE=embedded|h200|shapes; without NAME: list them
	@$(PY) -m experiments.study $(NAME) $(if $(NAME),$(if $(filter auto,$(PROFILE)),,profile=$(PROFILE)) $(ARGS))

fetch: setup ## Get the models and data of a profile into the cache; ARGS="model=qwen3_8b benchmark=aime25,math500"
	@$(PY) -m experiments.fetch profile=$(PROFILE) $(ARGS)

simulate: setup ## Model the H200 cells and the paper's card; ARGS="card=h100_nvl model=qwen3_8b batch=max_fit context=90000"
	@$(PY) -m experiments.simulate $(ARGS)

figures: setup ## Rebuild tables and figures from the committed records
	@$(PY) -m experiments.redraw $(ARGS)

report: setup ## Put every figure and table on one page, runs/report.html; ARGS="RESULTS OUT": another folder or file
	@$(PY) -m experiments.report $(ARGS)

verify-lossless: setup ## Compare the text of every method with autoregressive decoding
	@$(PY) -m experiments.lossless $(ARGS)

bench-cpu: setup ## Benchmark the embedded model on this CPU
	@$(PY) -m experiments.bench_cpu

bench-gpu: setup ## Benchmark the engine on a GPU; ARGS="suite=autoregressive|shapes|hetero|smollm2 out=DIR"
	@$(PY) -m experiments.bench_gpu $(ARGS)

bench-kernels: setup ## Time every kernel against the memory bandwidth of this GPU; ARGS="out=DIR tune only=TEXT"
	@$(PY) -m experiments.bench_kernels $(ARGS)

quality: setup ## Compare texts and scores of a run's methods: ARGS="FOLDER [OUT]", a folder with records
	@$(PY) -m experiments.quality $(ARGS)

upload: setup ## Send finished records to Weights & Biases: ARGS="FOLDER project=aspire entity=NAME"
	@$(PY) -m experiments.upload $(ARGS)

check: setup ## Check the committed records
	@$(PY) -m experiments.check results/records

clean: ## Remove .venv and caches; runs and results stay
	@rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
	@find aspire baselines experiments tests -name __pycache__ -type d -prune -exec rm -rf {} +
