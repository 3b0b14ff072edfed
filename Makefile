.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two workers suit the smallest machine we test on; additional threads of torch would compete with the other worker.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

SANITIZER ?= compute-sanitizer
# The cases of benchmarks/gpu.py for test-gpu: random images or mnist; the kernel, torch, or both.
TABLE ?= random kernel

.PHONY: help setup demo test test-slow test-gpu sanitize-gpu lint format bench docs clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(VENV)/.ready  ## create .venv with all development tools (other targets do this automatically)

demo: $(VENV)/.ready  ## run the demonstration on embedded data; writes a table and a report to demo-output/
	$(BIN)/upgd demo

test: $(VENV)/.ready  ## run the tests
	$(PYTEST) -n 2 --dist worksteal -m "not slow and not gpu"

test-slow: $(VENV)/.ready  ## run all tests, including slow ones (tens of minutes)
	$(PYTEST) -n 2 --dist worksteal -m "not gpu"

test-gpu:  ## run the GPU checks and print speeds; needs only torch and numpy
	PYTHONPATH=src:. $(PYTHON) tests/gpu_main.py
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.gpu $(TABLE)

# The sanitizer makes kernels much slower, so it runs small cases that cover every path, compiled beforehand. racecheck
# takes one after the other.
sanitize-gpu:  ## check the GPU kernels for memory errors and races; needs NVIDIA's compute-sanitizer
	PYTHONPATH=src:. $(PYTHON) tests/gpu_main.py kernels_compile
	PYTHONPATH=src:. $(SANITIZER) --tool memcheck --error-exitcode 1 $(PYTHON) tests/gpu_main.py --small
	PYTHONPATH=src:. $(PYTHON) tests/gpu_main.py --small --list | PYTHONPATH=src:. xargs -d '\n' -I NAME \
		$(SANITIZER) --tool racecheck --error-exitcode 1 $(PYTHON) tests/gpu_main.py --small NAME

lint: $(VENV)/.ready  ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.ready  ## format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.ready  ## run the benchmarks; speeds are ratios measured in one run
	$(BIN)/python -m benchmarks

docs: $(VENV)/.ready  ## build the documentation into site/, including generated pages
	$(BIN)/python docs/generate.py
	$(BIN)/zensical build --strict

clean:  ## remove the files created by the targets
	rm -rf $(VENV) site demo-output dist
