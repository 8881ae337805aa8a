# Two targets do everything on a fresh machine: `make demo` and `make test`; `make test-fast` is for while you work,
# `make docs` builds the documentation, `make release-check` tries what a release would be.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# The CPU build of torch is enough here; this range is the one pyproject.toml asks for.
TORCH = torch>=2.9,<2.14

# Packages are installed without bytecode, and every process that imports one keeps it for the next: torch and
# transformers alone take a process five seconds to compile, and the tests start dozens.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fast lint types unit docs gallery browser release-check clean

demo: $(VENV)/demo.stamp
	$(BIN)/headscope demo --out demo --force

# What waits for the network goes side by side, then style and types beside the tests: on two cores that takes less time.
test:
	$(MAKE) --jobs=2 $(VENV)/dev.stamp browser
	$(MAKE) --jobs=2 lint types unit

test-fast: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m "not slow and not whole"

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/vermin --quiet --no-tips --violations --target=3.10- headscope cli analyses examples

types: $(VENV)/dev.stamp
	$(BIN)/mypy

unit: $(VENV)/dev.stamp
	$(BIN)/python -m pytest

docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "Done. Open site/index.html, or with a search: $(BIN)/python -m http.server --directory site"

# Draws every picture of the documentation (docs/figures/draw.sh).
gallery: $(VENV)/dev.stamp
	$(BIN)/python -m scripts.gallery
	$(BIN)/python -m scripts.doc_pages

# Wheel and source into dist/, tried apart from the checkout on every Python at hand.
release-check: $(VENV)/dev.stamp
	$(BIN)/python -m scripts.release_check

# The tests of the HTML page drive a Chromium; where there is none they are skipped, but in CI they fail.
browser:
	@test -n "$$HEADSCOPE_CHROMIUM" && exit 0; \
	for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		apt-get install -y -qq --no-install-recommends chromium >/dev/null 2>&1 && exit 0; \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null && exit 0; \
	fi; \
	echo "no Chromium for the tests of the HTML page: install one, or say where it is in HEADSCOPE_CHROMIUM"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/demo.stamp: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --no-compile "$(TORCH)" -e ".[demo]"
	touch $@

$(VENV)/dev.stamp: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --no-compile "$(TORCH)" -e ".[dev]"
	touch $@

$(VENV)/docs.stamp: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --no-compile "$(TORCH)" -e ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) demo site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
