# make run and make test need nothing but Python >= 3.10 and the network.
PYTHON ?= python3
VENV ?= .venv
# what `pip -c` holds versions to; on a CUDA machine: make setup CONSTRAINTS=/dev/null
CONSTRAINTS ?= constraints.txt
LEN ?= 2000
OUT ?= runs/gpu
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup run test lint bench gate demo-model demo-draft gpu

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e ".[dev]"
	touch $@

run: setup
	$(BIN)/tswift generate --len $(LEN)

test: setup
	$(BIN)/python -m pytest -n 2

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
	$(BIN)/python -m tswift.training.demo --corpus $(CORPUS) --out src/tswift/models/demo

# train the model that drafts for it anew
demo-draft: setup
	$(BIN)/python -m tswift.training.demo_draft --corpus $(CORPUS) --out src/tswift/models/demo/draft

# What needs a CUDA device, with the interpreter at hand: PyTorch for CUDA is the machine's own. The GPU tests, then the
# figures in what is left of GPU_SECONDS; every file lands in OUT. Fails if a test or a section of the figures failed.
GPU_SECONDS ?= 530
GPU_TESTS_SECONDS ?= 150
GPU_FLAGS ?=
gpu:
	mkdir -p $(OUT)
	rm -f $(OUT)/gpu-tests.xml
	@began=$$(date +%s); export PYTHONPATH=src PYTHONUNBUFFERED=1; \
	timeout --signal=INT --kill-after=10 $(GPU_TESTS_SECONDS) \
	  $(PYTHON) -m pytest -m gpu tests/test_gpu.py --durations=10 --junitxml=$(OUT)/gpu-tests.xml; tests=$$?; \
	measure="$(PYTHON) -m benchmarks.gpu --out $(OUT) $(GPU_FLAGS)"; \
	$$measure --seconds $$(($(GPU_SECONDS) - $$(date +%s) + began)); figures=$$?; \
	if [ $$figures -gt 2 ]; then $$measure --resume; figures=1; fi; \
	exit $$((tests ? tests : figures))
