# Python 3.11 or newer, pip, git and make are all that is needed; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/pytest -q -n 2 --dist worksteal
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help venv demo test test-embedded test-remote test-ray test-browser test-foreign test-vllm test-peers test-sglang lint drill docs-faults draft bench-generate bench-capture bench-train bench-scan schemas lock clean test-docs docs docs-pages docs-tutorial wheel
WORK ?= $(HOME)/.cache/draftscope/embedded-train
DRILL ?= $(HOME)/.cache/draftscope/drill
STRONG ?= tests/data/narrow

help: ## what there is to make
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | expand -t 16

.venv/ready: requirements/lock.txt pyproject.toml scripts/venv
	@scripts/venv "$(PYTHON)"

venv: .venv/ready ## the environment, from requirements/lock.txt

demo: .venv/ready ## the case on the embedded pair: broken, diagnosed, fixed (ARGS="--fault token-shift")
	@$(BIN)/draftscope demo $(ARGS)

test: .venv/ready ## the tests that need no engine and no long run
	$(PYTEST) -m "embedded_quick or not (embedded or vllm or peers or sglang or remote or ray or docs or browser)" $(ARGS)

test-embedded: .venv/ready ## the tests on the embedded pair
	$(PYTEST) -m embedded $(ARGS)

test-remote: .venv/ready ## the tests over S3 and ssh, both on this machine (sshd: Debian's openssh-server)
	@scripts/env-remote "$(PYTHON)"
	$(PYTEST) -m remote $(ARGS)

test-browser: .venv/ready ## the report and the viewer in a real browser (Debian's chromium, or DRAFTSCOPE_CHROMIUM)
	@scripts/env-browser "$(PYTHON)"
	$(PYTEST) -n 0 -m browser $(ARGS)

test-ray: .venv/ready ## the tests on a Ray cluster of several nodes, all on this machine
	@scripts/env-ray "$(PYTHON)"
	$(PYTEST) -n 0 -m ray $(ARGS)

test-docs: .venv/ready ## the site built, its links and what it would fetch (in an environment of its own, 140 MB)
	@scripts/env-docs "$(PYTHON)"
	$(PYTEST) -n 0 -m docs $(ARGS)

test-foreign: test-vllm test-peers test-sglang ## the next three, in environments of their own (some GB each)

test-vllm: .venv/ready ## the tests against vLLM
	@scripts/env-vllm "$(PYTHON)"
	$(PYTEST) -n 0 -m "vllm and not peers" $(ARGS)

test-peers: .venv/ready ## the tests against speculators and SpecForge, with vLLM
	@scripts/env-vllm "$(PYTHON)"
	@scripts/env-speculators "$(PYTHON)"
	$(PYTEST) -n 0 -m "peers and not sglang" $(ARGS)

test-sglang: .venv/ready ## the tests against SGLang's draft classes, and against the workers of five releases, unpacked
	@scripts/env-sglang "$(PYTHON)"
	@scripts/env-sglang-wheels "$(BIN)/python"
	$(PYTEST) -n 0 -m sglang $(ARGS)

lint: .venv/ready ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/mypy

drill: .venv/ready ## the exercise on every pair, an hour on two cores (STRONG=DIR: another narrow draft)
	@scripts/drill "$(BIN)" "$(DRILL)" "$(STRONG)"

draft: .venv/ready ## train the embedded draft again, hours on two cores (WORK=DIR)
	$(BIN)/draftscope extract recipes/embedded/answers -o "$(WORK)"
	$(BIN)/python recipes/embedded/train.py --work "$(WORK)"

bench-train: .venv/ready ## training against speculators on the CPU, in tokens a second
	@scripts/env-speculators "$(PYTHON)"
	$(BIN)/python bench/bench_train.py $(ARGS)

bench-generate: .venv/ready ## speculation against plain decoding, in tokens a second
	$(BIN)/python bench/bench_generate.py $(ARGS)

bench-capture: .venv/ready ## what a capture costs a vLLM server, interleaved in one run
	@scripts/env-vllm "$(PYTHON)"
	$(BIN)/python bench/bench_capture.py $(ARGS)

bench-scan: .venv/ready ## the scan against dd and a plain torch script, in GB a second
	$(BIN)/python bench/bench_scan.py $(ARGS)

docs: ## the documentation's site, into site/
	@scripts/env-docs "$(PYTHON)"
	@scripts/docs build

docs-pages: .venv/ready ## the parts of docs/ that come from the code and from bench/results
	$(BIN)/python scripts/docs-pages

docs-tutorial: .venv/ready ## run docs/tutorial.md and quote what it prints, some minutes
	$(BIN)/python scripts/docs-tutorial

wheel: .venv/ready ## wheel and source archive, into dist/
	$(BIN)/python scripts/build dist

docs-faults: .venv/ready ## write docs/faults.md and docs/faults/ from the faults
	$(BIN)/python scripts/fault-pages

schemas: .venv/ready ## the JSON schemas that the package publishes
	$(BIN)/python scripts/schemas

lock: ## newest allowed versions into requirements/lock.txt
	@scripts/lock "$(PYTHON)"

clean: ## remove caches and build outputs, not .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
