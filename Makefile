# Two commands do everything on a fresh machine with Python 3.11 or newer: make quickstart, make test.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: quickstart test clean

quickstart: $(VENV)/installed
	$(BIN)/graphtrain data sample data/quickstart.jsonl
	$(BIN)/graphtrain data prepare data/quickstart.jsonl --output data/quickstart \
	  --tokenizer sentencepiece:4096
	$(BIN)/graphtrain plan examples/quickstart.toml
	$(BIN)/graphtrain compile examples/quickstart.toml
	$(BIN)/graphtrain run examples/quickstart.toml
	$(BIN)/graphtrain evaluate examples/quickstart.toml --bigram

# Files in their order: the short tests of tests/unit come last and fill every core to the end. By
# default the files with the fewest tests would, and those are the longest.
test: $(VENV)/installed-for-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/installed-for-tests: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) data runs
