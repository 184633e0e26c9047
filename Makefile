PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup train test campaign check format bench bench-loop bench-startup bench-checkpoint wheel clean

setup: $(INSTALLED)

# torch first and pinned, so that no other package's wish for a torch brings another build of it
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

train: setup
	$(BIN)/emrun train sample_configs/digits_convnet.yaml

test: setup
	$(BIN)/pytest -n 2

campaign: setup
	$(BIN)/pytest -n 2 -m campaign

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy -p emrun

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: bench-loop bench-startup bench-checkpoint

bench-loop: setup
	$(BIN)/python benchmarks/loop.py

bench-startup: setup
	$(BIN)/python benchmarks/startup.py

bench-checkpoint: setup
	$(BIN)/python benchmarks/checkpoint.py

wheel: setup
	$(BIN)/python -m build --wheel --outdir dist

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
