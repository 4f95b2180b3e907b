# `make run` trains the example, `make test` runs the tests; both first make .venv and install into it
# what they need (tools/venv.sh), which is done once.
#
#   ARGS="..."           more arguments for the command
#   PYTHON=python3.12    the interpreter to make .venv with: 3.10 or newer, default python3. If it has
#                        torch and Megatron-Core (a training container), those are used.
#   TORCH_INDEX_URL=...  the package index to take torch from. On Linux a plain torch brings gigabytes
#                        of CUDA libraries; PyTorch's own index of CPU wheels has one without.

PY = .venv/bin/python
SETUP = @sh tools/venv.sh

.PHONY: help run test conformance verify lint types clean
.DEFAULT_GOAL := help
.NOTPARALLEL:

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

run:  ## train the GRPO example on this machine
	$(SETUP) run
	$(PY) examples/train_grpo.py $(ARGS)

test:  ## run the tests
	$(SETUP) test
	$(PY) -m pytest $(ARGS)

conformance:  ## run the long matrix of layouts and Megatron-Core releases; writes docs/releases.md
	$(SETUP) test
	$(PY) tools/fetch_releases.py
	$(PY) -m pytest -m conformance --releases-table=docs/releases.md $(ARGS)

verify:  ## check the loss on the installed Megatron-Core
	$(SETUP) run
	.venv/bin/megatron-lossagg verify $(ARGS)

lint:  ## check style, format, docstrings and who imports whom
	$(SETUP) dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	.venv/bin/pydoclint --quiet megatron_lossagg plugin
	.venv/bin/lint-imports --no-logo

types:  ## check types
	$(SETUP) dev
	$(PY) -m mypy

clean:  ## remove .venv, .releases, build outputs and caches; keeps runs/
	rm -rf .venv .releases build dist *.egg-info .hypothesis  .grimp_cache .mypy_cache .pytest_cache \
		.ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
