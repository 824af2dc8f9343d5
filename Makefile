# make demo and make test are all that a fresh machine needs: both make the virtual environment first.
PY ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-gpu soak check venv peers sizes docs clean

demo: .venv/core
	$(BIN)/naught train

# Files in as many processes as there are cores, up to four: most of the time is that of processes that start and wait.
test: .venv/dev
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# The same on a GPU, with the Python and the torch that are there.
test-gpu:
	NAUGHT_DEVICE=cuda $(PY) -m pytest tests/test_parity.py tests/test_engine.py tests/test_volume.py tests/test_budgets.py \
		tests/test_parameters.py tests/test_mishaps.py tests/test_precision.py tests/test_rules.py tests/test_optimizers.py \
		tests/test_fragments.py tests/test_door.py tests/test_observation.py tests/test_starting.py tests/test_accelerator.py \
		tests/test_resume.py tests/test_async_saves.py tests/test_io_errors.py tests/test_weights.py \
		tests/test_watch.py tests/test_watchdog.py tests/test_shortage.py tests/test_offload.py \
		tests/test_delay.py tests/test_small_moments.py tests/test_disk.py tests/test_tiled.py tests/test_vertical.py tests/test_born.py \
		tests/test_activations.py tests/test_block_norms.py tests/test_ferry.py tests/test_early.py tests/test_used_again.py \
		tests/test_faults.py tests/test_faults_beside.py

# The large counts: every model, world, accumulation and clipping; many more examples of every property.
soak: .venv/dev
	NAUGHT_SOAK=1 NAUGHT_FUZZ=100000 HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest --timeout 36000

check: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

venv: .venv/dev

# DeepSpeed, for benchmarks/cpu.py, in an environment of its own: it patches torch.
peers:
	$(PY) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet -c constraints.txt torch numpy setuptools wheel ninja packaging
	DS_BUILD_OPS=0 .venv-peers/bin/python -m pip install --quiet -c constraints.txt --no-build-isolation deepspeed==0.19.8

sizes:
	@$(PY) tools/sizes.py

docs: .venv/dev
	$(BIN)/python tools/defaults_page.py > docs/config.md

clean:
	rm -rf .venv .venv-peers build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/core: pyproject.toml constraints.txt
	$(PY) -m venv .venv
	$(INSTALL) -e .
	@touch $@

.venv/dev: .venv/core
	$(INSTALL) -e '.[dev]'
	@touch $@
