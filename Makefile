# All that a fresh machine with Python 3.11 or newer needs: make quickstart, make test.
# docs/contributing/testing.md says what each tier of tests contains and takes.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
CHECK = $(VENV)-check
ALL = $(VENV)-all
PYTEST = python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

.PHONY: quickstart check test test-all docs reference clean

quickstart: $(VENV)/installed
	$(BIN)/graphtrain data sample data/quickstart.jsonl
	$(BIN)/graphtrain data prepare data/quickstart.jsonl --output data/quickstart \
	  --tokenizer sentencepiece:4096
	$(BIN)/graphtrain plan examples/quickstart.toml
	$(BIN)/graphtrain compile examples/quickstart.toml
	$(BIN)/graphtrain run examples/quickstart.toml
	$(BIN)/graphtrain evaluate examples/quickstart.toml --bigram

check: $(CHECK)/installed
	$(CHECK)/bin/ruff check .
	$(CHECK)/bin/ruff format --check .
	$(CHECK)/bin/lint-imports --no-cache
	$(CHECK)/bin/pyright --project .ci/pyright-light.json --pythonpath $(CHECK)/bin/python

# pytest-xdist takes the files in this order: the longest first, then short ones that keep every
# core busy to the end. By default it would begin with the files that have the most tests.
test: $(VENV)/installed-dev
	$(BIN)/$(PYTEST) tests/quick tests/unit

# TESTS: paths and options of pytest, by default all of tests/.
test-all: $(ALL)/installed
	$(ALL)/bin/pyright --pythonpath $(ALL)/bin/python
	$(ALL)/bin/$(PYTEST) $(TESTS)

# The documentation as a site in build/site.
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file docs/site/mkdocs.yml

# The pages of docs/reference that are made from the code.
reference: $(VENV)/installed
	$(BIN)/python docs/site/reference.py

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/installed-dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/installed

$(VENV)/installed-docs: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@ $(VENV)/installed

$(CHECK)/installed: pyproject.toml
	$(PYTHON) -m venv $(CHECK)
	$(CHECK)/bin/python -m pip install --quiet --editable '.[check]'
	touch $@

$(ALL)/installed: pyproject.toml
	$(PYTHON) -m venv $(ALL)
	$(ALL)/bin/python -m pip install --quiet --editable '.[test-all]'
	touch $@

clean:
	rm -rf $(VENV) $(CHECK) $(ALL) build data dist runs
