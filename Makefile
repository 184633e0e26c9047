PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PEERS := .venv-bench
LOADERS := .venv-loaders
MINUTES := 60
BASE := HEAD
COVERAGE := .coverage
COVER := PYTHONPATH=tests/contexts COVERAGE_FILE=$(CURDIR)/$(COVERAGE)/data
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export UV_CONSTRAINT := $(PIP_CONSTRAINT)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# uv, where it is installed, takes a fraction of the time of pip
ifneq ($(shell command -v uv),)
INSTALL := uv pip install --quiet --python $(VENV)
else
INSTALL := $(BIN)/pip install --quiet
endif

.PHONY: help setup train test test-fast test-changed campaign coverage test-gpu guards check format bench bench-loop bench-step bench-updates bench-bytecodes bench-hooks bench-startup bench-checkpoint bench-compile bench-streams bench-listing bench-completion bench-sweep bench-report bench-verdicts bench-peers bench-loaders bench-trainer docs docs-pictures docs-questions docs-serve wheel release-check clean

help:  ## Print what `make` can do.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(INSTALLED)  ## Create the virtual environment .venv with emrun and all that its tests need.

# torch is installed first and pinned, so that no other package installs another build of it; torchvision in a folder of
# its own, which only the tests use: torchmetrics imports torchvision, and beside torch for CPUs that is an error
$(INSTALLED): pyproject.toml constraints.txt
	@echo "Installing PyTorch and emrun into $(VENV); this takes two to five minutes, without further output."
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) "$$(grep '^torch==' constraints.txt)"
	$(INSTALL) --editable '.[dev]'
	$(INSTALL) --no-deps --target $(VENV)/vision "$$(grep '^torchvision==' constraints.txt)"
	touch $@

train: setup  ## Train a sample.
	$(BIN)/emrun train sample_configs/digits_convnet.yaml

test: setup  ## Run the tests, on two cores.
	$(BIN)/pytest -n 2 --dist worksteal

# without the tests that start the installed command or worker processes, make whole runs or cause faults
test-fast: setup  ## Run the tests without the installed command, whole runs and faults.
	$(BIN)/pytest -n 2 --dist worksteal -m 'not slow and not campaign'

# the folders of the packages that differ from a commit, and of those above them: make test-changed BASE=main~3
test-changed: setup  ## Run the tests of what differs from the last commit, or from BASE=COMMIT.
	tests=$$($(BIN)/python tests/changed.py $(BASE)) && if [ -n "$$tests" ]; then $(BIN)/pytest -n 2 --dist worksteal $$tests; fi

# by hand, on a machine with a GPU; elsewhere all are skipped, with their count
test-gpu: setup  ## Run the tests that need a GPU, on a machine that has one.
	$(BIN)/pytest tests/gpu

campaign: setup  ## Run faults and longer tests for MINUTES=60.
	$(BIN)/pytest -n 2 -m 'campaign or fault' --campaign $(MINUTES)

# lines and branches that the tests execute, and which tests execute each; twice as long as the tests
coverage: setup  ## Run the tests and print which lines and branches they execute.
	rm -rf $(COVERAGE) && mkdir -p $(COVERAGE)
	-$(COVER) $(BIN)/coverage run $(BIN)/pytest -n 2 --dist worksteal -p emrun_contexts --timeout 400
	$(COVER) $(BIN)/coverage combine --quiet $(COVERAGE)
	$(COVER) $(BIN)/coverage report --skip-covered --format total

# takes out 40 guards one by one and says which tests notice
guards: coverage  ## Take out 40 guards, one by one, and print which tests notice.
	$(BIN)/python tests/guards.py try $(COVERAGE)/data --count 40 --jobs 2

check: setup  ## Check the style, the format and the types of the code.
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy -p emrun

format: setup  ## Mend what ruff can mend.
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: bench-peers bench-step bench-bytecodes bench-updates bench-hooks bench-startup bench-checkpoint bench-compile bench-streams bench-listing bench-completion bench-sweep bench-report bench-verdicts  ## Measure what emrun costs, in about twenty minutes.

bench-loop: setup  ## Measure the loop alone, beside a raw loop of PyTorch.
	$(BIN)/python benchmarks/peers.py --only bare,begun,begun_long,null --peers emrun --rounds 30

bench-step: setup  ## Measure where the microseconds of a step go.
	$(BIN)/python benchmarks/step.py

bench-bytecodes: setup  ## Count the bytecodes of a step.
	$(BIN)/python benchmarks/bytecodes.py

bench-updates: setup  ## Measure what is done around an update: clipping, averages, schedules.
	$(BIN)/python benchmarks/updates.py

bench-hooks: setup  ## Measure the hooks.
	$(BIN)/python benchmarks/hooks.py

bench-startup: setup  ## Measure the start of commands, and their end.
	$(BIN)/python benchmarks/startup.py

bench-checkpoint: setup  ## Measure checkpoints.
	$(BIN)/python benchmarks/checkpoint.py

bench-compile: setup  ## Measure compiled models.
	$(BIN)/python benchmarks/compile.py

bench-streams: setup  ## Measure streams, threads and worker processes.
	$(BIN)/python benchmarks/streams.py

bench-listing: setup  ## Measure emrun ls over 1,000 runs.
	$(BIN)/python benchmarks/listing.py

bench-completion: setup  ## Measure the completion in a shell.
	$(BIN)/python benchmarks/completion.py

bench-sweep: setup  ## Measure the trials of a sweep.
	$(BIN)/python benchmarks/sweep.py

bench-report: setup  ## Measure the page of many runs.
	$(BIN)/python benchmarks/report.py

bench-verdicts: setup  ## Measure how often emrun compare is right.
	$(BIN)/python benchmarks/verdicts.py

bench-peers: $(PEERS)/.installed  ## Compare emrun with other training frameworks.
	$(PEERS)/bin/python benchmarks/peers.py

# a separate environment: the peers need packages that emrun is tested without
$(PEERS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(PEERS)/bin/pip install --quiet --editable '.[bench]'
	touch $@

bench-trainer: setup  ## Compare emrun with transformers.Trainer.
	$(BIN)/python benchmarks/trainer.py

bench-loaders: $(LOADERS)/.installed  ## Compare the reading of images and rows with other loaders.
	$(LOADERS)/bin/python benchmarks/loaders.py

# litdata and mosaicml-streaming without clients of clouds and other builds of torch, which the benchmark does not need
$(LOADERS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(LOADERS)
	$(LOADERS)/bin/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(LOADERS)/bin/pip install --quiet --editable . pillow psutil torchdata
	-$(LOADERS)/bin/pip install --quiet webdataset spdl-core
	-$(LOADERS)/bin/pip install --quiet lightning-utilities requests tifffile obstore
	-$(LOADERS)/bin/pip install --quiet Brotli python-snappy zstd xxhash catalogue tqdm
	-$(LOADERS)/bin/pip install --quiet --no-deps litdata mosaicml-streaming
	touch $@

# the site of docs/, in build/site: strictly, so that a link that leads nowhere is an error
docs: $(VENV)/.docs  ## Build the site of docs/ in build/site.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# asks the search of the site what newcomers ask, and counts the answers; needs node
docs-questions: docs  ## Ask the search of the site what newcomers ask.
	node docs/_site/questions.mjs

docs-serve: $(VENV)/.docs  ## Show the site of docs/ at 127.0.0.1:8000.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8000

$(VENV)/.docs: $(INSTALLED)
	$(BIN)/pip install --quiet --editable '.[docs]'
	touch $@

# the pictures of docs: those of docs/start from the runs of its pages, those of pages of runs through Chromium
docs-pictures: setup  ## Make the pictures of docs again.
	OMP_NUM_THREADS=1 $(BIN)/python docs/pictures.py
	$(BIN)/python docs/_site/screens.py

wheel: setup  ## Build the wheel in dist/.
	$(BIN)/python -m build --wheel --outdir dist

# the wheel on each Python and torch that is promised, and with each extra: hours; make release-check ROWS='3.14 sweep'
release-check: setup  ## Try the wheel on each Python, torch and extra.
	$(BIN)/python tests/release_check.py $(ROWS)

clean:  ## Delete the virtual environments and all that was built.
	rm -rf $(VENV) $(PEERS) $(LOADERS) $(COVERAGE) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
