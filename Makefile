# Two commands need nothing but Python 3.11+ and pip: `make demo` and `make test`.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
INPUTS := $(wildcard requirements/*.txt pyproject.toml backends/*/pyproject.toml conformance/pyproject.toml)
DISTRIBUTIONS := . conformance $(wildcard backends/*)

.PHONY: demo test test-full lint bench clean

demo: $(STAMP)
	$(BIN)/python -m kimi_hal_conformance.demo

test: $(STAMP)
	$(BIN)/python tests/parts.py

test-full: $(STAMP)
	$(BIN)/python tests/parts.py --full

lint: $(STAMP)
	$(BIN)/python tests/parts.py --only lint

bench: $(STAMP)
	$(BIN)/python -m benchmarks

$(STAMP): $(INPUTS)
	@echo "Installing the pinned environment into $(VENV), once: 3 GB on disk, some minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements/workload.txt -r requirements/kernels.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps \
		$(foreach path,$(DISTRIBUTIONS),-e $(path))
	touch $(STAMP)

clean:
	rm -rf $(VENV) .nox build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
