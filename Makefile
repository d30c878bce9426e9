# Every target except dist and clean first sets up .venv.
# make demo   run the demo on built-in data
# make test   run the linters, the type checker, the layer check, the check of English and the tests
# make test-federation  test complete federations on loopback, with faults and refusals
# make test-long  test the variants of every method and the slow cases
# make check  run the linters, the type checker, the layer check and the check of English
# make sizes  compare the size of the source with its limits
# make docs   build the documentation into site/; make docs-serve shows it while you edit
# make dist   build wheel and source distribution, check them, install the wheel and run its demo
# make bench  compare Atoll with its peers on this machine; ATOLL_DATA must name a folder with Cora
# make clean  delete environments and build outputs
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test test-federation test-long check sizes docs docs-serve dist bench clean

demo: $(VENV)/installed
	$(BIN)/atoll demo

test: $(VENV)/installed-dev check
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-federation: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n 3 --dist loadfile -m 'federation and not long' tests/e2e

test-long: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m long

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/english.py

sizes: $(VENV)/installed-dev
	$(BIN)/python tools/sizes.py -v

docs: $(VENV)/installed-dev
	$(BIN)/zensical build --clean --strict

docs-serve: $(VENV)/installed-dev
	$(BIN)/zensical serve --dev-addr 127.0.0.1:8000

dist:
	rm -rf build dist .dist-venv
	$(PYTHON) -m venv .dist-venv/tools
	.dist-venv/tools/bin/python -m pip --disable-pip-version-check install -q build twine
	.dist-venv/tools/bin/python -m build
	.dist-venv/tools/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv .dist-venv/empty
	.dist-venv/empty/bin/python -m pip --disable-pip-version-check install -q -c constraints.txt dist/*.whl
	cd .dist-venv && empty/bin/atoll demo

bench: $(VENV)/installed
	$(BIN)/python -m bench all --out bench.json

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Atoll needs Python 3.11 or newer; set PYTHON=... to a newer Python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install -q -c constraints.txt -e '.[report]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) install -q -c constraints.txt -e '.[report,dev]'
	@touch $@

clean:
	rm -rf $(VENV) .bench-venv .bench-flower .dist-venv .cache build dist site
