.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two workers fit the smallest machine we test on; each of torch's threads would only fight the other worker.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

SANITIZER ?= compute-sanitizer
# What benchmarks/gpu.py measures for test-gpu: random images or mnist; the kernel, torch, or both.
TABLE ?= random kernel

.PHONY: help setup demo test test-slow test-gpu sanitize-gpu lint format bench docs clean

help:  ## show what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(VENV)/.ready  ## create .venv with everything for development (the other targets do it by themselves)

demo: $(VENV)/.ready  ## see the method work, on embedded data: a table and a picture in demo-output/
	$(BIN)/upgd demo

test: $(VENV)/.ready  ## run the tests
	$(PYTEST) -n 2 --dist worksteal -m "not slow and not gpu"

test-slow: $(VENV)/.ready  ## run the large checks, too (tens of minutes)
	$(PYTEST) -n 2 --dist worksteal -m "not gpu"

test-gpu:  ## run the checks that need a GPU, and print its speeds; asks for torch and numpy alone
	PYTHONPATH=src:. $(PYTHON) tests/gpu_main.py
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.gpu $(TABLE)

# The sanitizer slows kernels down many times, so it gets the run that takes every path in few steps, compiled beforehand.
sanitize-gpu:  ## look for memory errors and races in the GPU's kernel; asks for NVIDIA's compute-sanitizer
	PYTHONPATH=src:. $(PYTHON) tests/gpu_main.py kernels_compile
	PYTHONPATH=src:. $(SANITIZER) --tool memcheck --error-exitcode 1 $(PYTHON) tests/gpu_main.py --small
	PYTHONPATH=src:. $(SANITIZER) --tool racecheck --error-exitcode 1 $(PYTHON) tests/gpu_main.py --small

lint: $(VENV)/.ready  ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.ready  ## let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.ready  ## measure speed as ratios, side by side in one run
	$(BIN)/python -m benchmarks

docs: $(VENV)/.ready  ## build the documentation into site/, its lists of commands and problems included
	$(BIN)/python docs/generate.py
	$(BIN)/zensical build --strict

clean:  ## remove what the targets made
	rm -rf $(VENV) site demo-output dist
