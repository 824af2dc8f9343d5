# make demo and make test are all that a fresh machine needs: both make the virtual environment first.
PY ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test soak check venv sizes docs clean

demo: .venv/core
	$(BIN)/python examples/plan_questions.py

test: .venv/dev
	$(BIN)/python -m pytest

# The large counts: every model, world, accumulation and clipping; many more examples of every property.
soak: .venv/dev
	NAUGHT_SOAK=1 NAUGHT_FUZZ=100000 HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest --timeout 36000

check: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

venv: .venv/dev

sizes:
	@$(PY) tools/sizes.py

docs: .venv/dev
	$(BIN)/python tools/defaults_page.py > docs/config.md

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/core: pyproject.toml constraints.txt
	$(PY) -m venv .venv
	$(INSTALL) -e .
	@touch $@

.venv/dev: .venv/core
	$(INSTALL) -e '.[dev]'
	@touch $@
