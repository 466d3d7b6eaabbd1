# make serve   serves the demo model on http://127.0.0.1:8000 (PORT=, MODEL=, ARGS= for more flags)
# make test    runs the tests (ARGS= for pytest's flags)
# make check   format, lint and types; `make format` puts the first two right
# make setup   only prepares: the environment that all of these make when it is not there

PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
MODEL ?= demo
ARGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: serve test check format setup

serve: setup
	@exec $(BIN)/oaiserve serve $(MODEL) --port $(PORT) $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

setup: $(INSTALLED)

$(INSTALLED): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("oaiserve needs Python 3.11 or newer, but $(PYTHON) is %d.%d. Name another one, as in: make PYTHON=python3.12" % sys.version_info[:2])'
	@echo "Installing oaiserve and what it needs into $(VENV) (some minutes, only this once) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@
