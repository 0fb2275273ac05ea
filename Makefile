# Everything a user or CI runs. Each target sets the machine up first; that costs nothing once it is done.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# The system's Python first, if it has venv and headers: Debian compiles it with profiles. Imports take an eighth longer with one that pyenv built.
SYSTEM_PYTHON := /usr/bin/python3.11
IS_COMPLETE := import ensurepip, os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))
PYTHON ?= $(shell $(SYSTEM_PYTHON) -c '$(IS_COMPLETE)' 2> /dev/null && echo $(SYSTEM_PYTHON) || command -v python3.11 || command -v python3)
VENV := .venv/bin

# The stamp's name is a hash of everything set-up depends on, the place included: editable installs hold absolute paths.
SETUP_INPUTS := pyproject.toml crds/pyproject.toml crds/convert/pyproject.toml operator/pyproject.toml runtime/pyproject.toml $(filter-out constraints/sglang.txt,$(wildcard constraints/*.txt)) tools/setup.py
STAMP := .venv/.rljob-setup-$(shell { cat $(SETUP_INPUTS); echo "$(CURDIR)"; } | sha256sum | cut -c1-16)

# SGLang's packages conflict with those of vLLM: an environment of its own, of the plain pins in constraints/sglang.txt.
SGLANG_STAMP := .venv-sglang/.rljob-setup-$(shell { cat constraints/sglang.txt tools/setup.py; echo "$(CURDIR)"; } | sha256sum | cut -c1-16)

# Where no bytecode is kept vLLM imports three times slower; a foreign PYTHONPATH would shadow the packages of this tree.
unexport PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX PYTHONPATH PYTHONHOME
export PATH := $(CURDIR)/$(VENV):$(PATH)
export DO_NOT_TRACK := 1
export RAY_USAGE_STATS_ENABLED := 0
export VLLM_NO_USAGE_STATS := 1
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: help setup setup-sglang run test test-slow test-all check docs bench chaos generate e2e cluster-up cluster-down cluster-status clean distclean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv with everything in it (first time: 1 minute to many, 3.6 GB to download, 8 GB on disk)

$(STAMP):
	@test -n "$(PYTHON)" || { echo "make: no python3.11 found; install it (Debian 12: apt-get install python3 python3-venv)" >&2; exit 1; }
	@$(PYTHON) tools/setup.py --stamp $@

setup-sglang: $(SGLANG_STAMP) ## Make .venv-sglang, the second rollout engine on CPU (150 MB more to download, 0.9 GB more on disk, or 5.4 where uv cannot link)

$(SGLANG_STAMP): | $(STAMP)
	@$(VENV)/python tools/setup.py --sglang --stamp $@

models/tiny/config.json: | $(STAMP)
	rljob model tiny --out models/tiny

run: $(STAMP) models/tiny/config.json ## Quickstart: a whole GRPO run on this machine's CPU
	rljob run examples/quickstart.yaml --overwrite

# Files side by side in one process of pytest more than there are cores (tests/conftest.py), longest first.
PYTEST := pytest -n auto --dist loadfile --no-loadscope-reorder --durations=15 --durations-min=1

# Without it, its tests are skipped.
API_SERVER := ! command -v go > /dev/null || python -m e2e.cluster build --mode api || [ -z "$${CI:-}" ]

test: $(STAMP) ## Unit, property, layout and short integration tests
	@$(API_SERVER)
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(STAMP) ## Whole jobs, faults in them, learning runs: minutes each
	$(PYTEST) -m slow -v $(ARGS)

test-all: $(STAMP) ## Both in one session, as CI does: what they share is started once
	@$(API_SERVER)
	$(PYTEST) $(ARGS)

check: $(STAMP) ## Lint, format, types, import contracts, layout gates, generated files
	@tools/check

docs: $(STAMP) ## Build the documentation site into build/site, strictly
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet

bench: $(STAMP) ## Ratios against peers and limits, written to bench/results/
	python -m bench $(ARGS)

chaos: $(STAMP) ## A thousand faults at random moments: driver loop, operator on a real API server, real processes
	python -m bench.chaos $(ARGS)

generate: $(STAMP) ## Write the CRD, its helm copy and the field reference from rljob_api
	python -m rljob_api generate --out .
	python -m rljob_runtime.report --out .
	python tools/dashboards.py

e2e: $(STAMP) ## A real cluster, the built images, the installed chart, every scenario (as root; 10 minutes more the first time)
	tools/e2e $(ARGS)

cluster-up: $(STAMP) ## Real Kubernetes with KubeRay on this machine, as root (the first time it is built from source: about 10 minutes)
	python -m e2e.cluster up

cluster-down: $(STAMP) ## Stop that cluster and remove all of it
	python -m e2e.cluster down

cluster-status: $(STAMP) ## What of it runs, where it logs, its nodes and pods
	python -m e2e.cluster status

clean: ## Remove caches, builds and the quickstart's output
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist runs
	find crds operator runtime tests tools bench e2e -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Also remove .venv and the made models
	rm -rf .venv .venv-sglang models
