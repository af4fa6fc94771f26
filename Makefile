# make demo | test | test-titan | test-slurm | test-k8s | test-ray | fuzz | soak | check | proto | loc | clean
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# CPU wheels of torch: plain "torch" would take gigabytes of CUDA. Set TORCH= to keep what the environment has.
TORCH ?= torch==2.13.0

.PHONY: demo test test-titan test-slurm test-k8s test-ray fuzz soak check proto loc clean env

env: $(VENV)/.made

$(VENV)/.made: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt $(TORCH)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: env
	$(BIN)/planaria demo

test: env
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not e2e and not gpu and not slurm and not k8s and not ray"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "e2e and not gpu"

# torchtitan brings some 65 packages: it has an environment of its own, and make test skips what needs it.
TITAN := .venv-titan

$(TITAN)/.made: pyproject.toml constraints.txt tests/titan/constraints.txt
	test -x $(TITAN)/bin/python || $(PYTHON) -m venv $(TITAN)
	grep -v '^datasets==' constraints.txt | cat - tests/titan/constraints.txt > $(TITAN)/constraints.txt
	$(TITAN)/bin/pip install -q --disable-pip-version-check -c $(TITAN)/constraints.txt $(TORCH)
	$(TITAN)/bin/pip install -q --disable-pip-version-check -c $(TITAN)/constraints.txt -e '.[titan,dev]'
	touch $@

test-titan: $(TITAN)/.made
	OMP_NUM_THREADS=1 $(TITAN)/bin/python -m pytest tests/titan

# On a Slurm of its own, of three nodes on this machine; as root. Where Slurm is not installed, Debian's packages are
# unpacked into ~/.cache, once; where that cannot be, tests are skipped.
test-slurm: env
	OMP_NUM_THREADS=1 PLANARIA_FETCH_SLURM=1 $(BIN)/python -m pytest tests/slurm -m slurm -rs

# A control plane is built from Debian's source package, once and into ~/.cache; where that cannot be, tests are skipped.
test-k8s: env
	OMP_NUM_THREADS=1 PLANARIA_BUILD_KUBERNETES=1 $(BIN)/python -m pytest -m k8s tests/kubernetes

# Ray fits to all else, but it is large (260 MB), so only this brings it; where it cannot be had, tests are skipped.
test-ray: env
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[ray]' || echo "Ray cannot be installed"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/ray -m ray -rs

# Other bytes and other examples each time; CI tries a few, always the same.
EXAMPLES ?= 20000
fuzz: env
	PLANARIA_FUZZ=$(EXAMPLES) PLANARIA_FUZZ_START=$$(date +%s) $(BIN)/python -m pytest tests/fuzz --timeout 0
	OMP_NUM_THREADS=1 PLANARIA_FUZZ=$(EXAMPLES) $(BIN)/python -m pytest tests -m hypothesis --timeout 0

# Two hours of trouble, as long as the machine is quiet; make soak MINUTES=10
MINUTES ?= 120
soak: env
	OMP_NUM_THREADS=1 $(BIN)/python bench/soak.py --minutes $(MINUTES)

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
	rm -rf $(VENV) $(TITAN) build *.egg-info
