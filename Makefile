# Everything a newcomer or CI runs. `make` alone lists the targets.
#   PYTHON=python3.12   the interpreter to build the environment with (3.10 to 3.13)
#   ARGS=...            passed on: make demo ARGS="train.seed=7", make test ARGS="-k plan"

VENV ?= .venv
ARGS ?=
RUN := $(VENV)/bin/python -m

export PYTHON VENV

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-gpu check lint types format clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## create the virtual environment .venv and install the pinned packages (the targets below do it by themselves)
	@bash tests/tools/setup.sh

demo: setup ## train the tiny reranker on handwritten digits: the main job, a few minutes on two cores
	$(RUN) launcher $(ARGS)

test: setup ## every test that needs no GPU
	$(RUN) pytest -m "not gpu" $(ARGS)

test-gpu: setup ## the tests that need an NVIDIA GPU
	$(RUN) pytest -m gpu $(ARGS)

check: lint types ## lint and types: what CI asks before the tests

lint: setup ## formatting and ruff's rules, changing nothing
	$(RUN) ruff format --check .
	$(RUN) ruff check .

types: setup ## mypy: strict for planning and running
	$(RUN) mypy

format: setup ## rewrite the files as `make lint` wants them
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

clean: ## remove the environment, builds and caches; runs/ stays
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find launcher tests -name __pycache__ -type d -prune -exec rm -rf {} +
