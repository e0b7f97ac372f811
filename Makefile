# make run and make test need nothing but Python >= 3.10 and the network.
PYTHON ?= python3
VENV ?= .venv
# what `pip -c` holds versions to; on a CUDA machine: make setup CONSTRAINTS=/dev/null
CONSTRAINTS ?= constraints.txt
LEN ?= 2000
OUT ?= runs/gpu/out
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup run test test-all test-isa lint bench gate demo-model demo-draft gpu gpu-dry

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e ".[dev]"
	touch $@

run: setup
	$(BIN)/tswift generate --len $(LEN)

test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal

# the slow ones too, and more examples of each property
PROFILE ?= ci
test-all: setup
	HYPOTHESIS_PROFILE=$(PROFILE) $(BIN)/python -m pytest -n 2 --dist worksteal -m ""

# what other processors could compute otherwise, under the instruction sets that this one can stand in for
test-isa: setup
	$(BIN)/python -m pytest -n 2 -m slow --durations=0 tests/lossless/test_processors.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# the default table: alpha, x and wall time up to 100,000 tokens; an hour or more on a CPU
BENCH ?= --prefill 4096
bench: setup
	$(BIN)/tswift bench $(BENCH)

# Counters of a small benchmark against the committed ones. They are exact for a seed, so nothing may get worse; in
# float64, so that no near-tie falls differently on another processor.
gate: setup
	$(BIN)/tswift bench --prefill 1024 --lens 500,1000 --seeds 0,1 --dtype float64 --no-plots --no-progress \
	  --methods ar,medusa,tokenswift,cascade,recall,standalone,triforce --costs nominal \
	  --against results/baseline.json --fail-on alpha --fail-on beta --fail-on tokens_per_step --fail-on passes

# train the bundled model anew: make demo-model CORPUS=folder-or-hub-id
CORPUS ?= emozilla/pg19
demo-model: setup
	$(BIN)/python -m recipes.demo --corpus $(CORPUS) --out src/tswift/models/demo

# train the model that drafts for it anew
demo-draft: setup
	$(BIN)/python -m recipes.demo_draft --corpus $(CORPUS) --out src/tswift/models/demo/draft

# Tests and measurements on a CUDA device, with the interpreter at hand: PyTorch for CUDA is the machine's own. Figures
# are kept in runs/gpu as they are made; OUT gets the report and two archives. Fails if a section failed.
GPU_SECONDS ?= 530
COMMIT ?= $(shell git rev-parse HEAD 2>/dev/null)
CACHE ?= $(wildcard results/h200/cache.tgz)
GPU_FLAGS ?=
GPU_PYTHON ?= $(PYTHON)
GPU_RUN = PYTHONPATH=src PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 $(GPU_PYTHON) -m benchmarks.gpu --out $(OUT) $(GPU_FLAGS)
gpu:
	$(GPU_RUN) --seconds $(GPU_SECONDS) $(if $(COMMIT),--commit $(COMMIT)) $(if $(CACHE),--cache $(CACHE))

# every section of it on the CPU, in tiny sizes
gpu-dry: GPU_PYTHON = $(BIN)/python
gpu-dry: setup
	$(GPU_RUN) --dry
