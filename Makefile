# Python 3.11 or newer, pip, git and make are all that is needed; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/pytest -q
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help venv demo test test-embedded lint schemas lock clean

help: ## what there is to make
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | expand -t 16

.venv/ready: requirements/lock.txt pyproject.toml scripts/venv
	@scripts/venv "$(PYTHON)"

venv: .venv/ready ## the environment, from requirements/lock.txt

demo: .venv/ready ## the case on the embedded pair: broken, diagnosed, fixed (ARGS="--fault token-shift")
	@$(BIN)/draftscope demo $(ARGS)

test: .venv/ready ## the tests that need no engine and no long run
	$(PYTEST) -m "embedded_quick or not (embedded or vllm or peers)" $(ARGS)

test-embedded: .venv/ready ## the tests on the embedded pair
	$(PYTEST) -m embedded $(ARGS)

lint: .venv/ready ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/mypy

schemas: .venv/ready ## the JSON schemas that the package publishes
	$(BIN)/python scripts/schemas

lock: ## newest allowed versions into requirements/lock.txt
	@scripts/lock "$(PYTHON)"

clean: ## remove caches and build outputs, not .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
