# Every target makes its own virtual environment: python3, make and a C++ compiler are enough.
#   make demo                  train a small GPT, compiled against eager DDP
#   make test                  ruff, mypy, then the tests that need no GPU
#   make test TORCH=2.11.0     the same with that torch, in an environment of its own
#   make test ARGS="-k clip"   more arguments for the command that runs (test, demo, bench)

PYTHON ?= python3
TORCH  ?=
ARGS   ?=

VENV := .venv$(if $(TORCH),-$(TORCH))
BIN  := $(VENV)/bin
# Modules are compiled as they are first imported: of torch's and of what tests install few ever are.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check --quiet install --no-compile
export PYTHONDONTWRITEBYTECODE :=
# The types are checked while what tests need is installed. Of several goals each would install at the same time.
ifeq ($(words $(MAKECMDGOALS)),1)
MAKEFLAGS += --jobs=2
endif

TORCH_SPEC   := $(if $(TORCH),torch==$(TORCH),torch>=2.11,<2.14)
# The annotations of torch differ by version: what must be ignored in one is no error in another.
MYPY_FLAGS   := $(if $(TORCH),--no-warn-unused-ignores)
# A worker per core and one more, since tests on ranks wait for each other a good part of their time; each has processes
# of its own for those, so at most eight workers, for the memory's sake.
# One that is done takes over half of what another has left, so neighbours stay together. ARGS=-n0: all in one
# process, as tests on GPUs want it.
WORKERS      := -n $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1) --maxprocesses 8 --dist worksteal
# Tests start many processes, which find what Python has compiled, whatever the environment says of that.
TEST_COMMAND := env PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m "not gpu" --durations=15 $(WORKERS) $(ARGS)

.DEFAULT_GOAL := help
.PHONY: help demo test lint types bench checks test-command clean

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

demo: $(VENV)/.ready
	$(BIN)/wholestep calibrate > /dev/null
	$(BIN)/wholestep demo $(ARGS)

bench: $(VENV)/.ready
	$(BIN)/wholestep calibrate
	$(BIN)/wholestep bench $(ARGS)
	$(BIN)/python benchmarks/host_overhead.py

test: checks
	@$(TEST_COMMAND)

checks: lint types $(VENV)/.ready-test

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .

types: $(VENV)/.ready-dev
	$(BIN)/mypy $(MYPY_FLAGS)

# For .ci/run, which runs the command itself so that nothing follows the last line of pytest.
test-command:
	@echo '$(TEST_COMMAND)'

# torch comes first and alone: whatever is installed later finds it there and asks for no other one.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) '$(TORCH_SPEC)'
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.torch pyproject.toml
	$(INSTALL) -e '.[dev]'
	@touch $@

$(VENV)/.ready: EXTRAS :=
$(VENV)/.ready-test: EXTRAS := [test]
$(VENV)/.ready-test: $(VENV)/.ready-dev  # not both at once
$(VENV)/.ready $(VENV)/.ready-test: $(VENV)/.torch pyproject.toml $(wildcard src/wholestep/capture/native/*.cpp src/wholestep/capture/native/*.h)
	$(INSTALL) -e '.$(EXTRAS)'
	@$(BIN)/python -m wholestep.capture.native || echo "no harm: see docs/performance.md"
	@touch $@

clean:
	rm -rf .venv .venv-* build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
