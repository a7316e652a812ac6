# What the project can do, one target each; `make` lists them. CI runs `make test`.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The top-level `passes` is a link into ampfx, so folders are named one by one.
CODE := ampfx bench examples tests
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo check format test golden docs bench clean

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

$(STAMP): pyproject.toml constraints.txt
	@echo "Making $(VENV) with all that is needed, once; this takes a minute or two."
	@echo "Making $(VENV) with all that is needed; this takes a minute or two, once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e '.[dev,demo]'
	@touch $@

setup: $(STAMP)  ## make .venv with everything that the other targets need

demo: $(STAMP)  ## train two small models on handwritten digits in each precision and compare
	$(BIN)/python -m examples.digits $(ARGS)

check: $(STAMP)  ## lint and type-check
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy

format: $(STAMP)  ## sort imports and mend what ruff can mend by itself
	$(BIN)/ruff check --fix $(CODE)

test: check  ## lint, type-check, and run all tests
	$(BIN)/python -m pytest $(ARGS)

golden: $(STAMP)  ## rewrite the expected texts in tests and docs from what the code prints now
	AMPFX_GOLDEN=1 $(BIN)/python -m pytest $(ARGS)
	@git --no-pager diff --stat

docs: $(STAMP)  ## run the code of README and docs and check the outputs shown there
	$(BIN)/python -m pytest tests/test_docs.py $(ARGS)

bench: $(STAMP)  ## counts and paired step times against float32 and torch.autocast
	$(BIN)/python -m bench $(ARGS)

clean:  ## remove .venv and caches
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
