# make demo | test | check | proto | loc | clean
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# CPU wheels of torch: plain "torch" would take gigabytes of CUDA. Set TORCH= to keep what the environment has.
TORCH ?= torch==2.13.0

.PHONY: demo test check proto loc clean env

env: $(VENV)/.made

$(VENV)/.made: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt $(TORCH)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: env
	$(BIN)/planaria demo

test: env
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not e2e and not gpu"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "e2e and not gpu"

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

proto:
	PYTHON=$(PYTHON) sh tools/protos.sh

loc:
	@$(PYTHON) tools/loc.py

clean:
	rm -rf $(VENV) build *.egg-info
