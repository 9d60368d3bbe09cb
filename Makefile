# make install: into .venv what the others need, and nothing else; they install by themselves.
# make demo: install, run the pipeline on config/config.yaml, say where the report is and how to chat with the model.
# make test: what to run before a commit.   make test-all: every test, as CI does.   make bench: measure what docs/data.md claims.
# make mutants: put plausible faults into copies of the code, one at a time, and say which of them the tests notice.
# `make PYTHON=python3.12 demo` takes another interpreter; any from 3.11 on will do.
# `make WORKERS=8 test` tests with 8 processes; on two cores 4 are best, since some of them wait for SLURM most of the time.

PYTHON ?= python3
WORKERS ?= 4
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# uv takes a quarter of the time where it is installed; CI sets UV to nothing, since only pip finds its index of torch.
UV ?= $(shell command -v uv)
PIP := $(if $(UV),$(UV) pip install -q --python $(BIN)/python,$(BIN)/python -m pip install -q) --constraint constraints.txt
# Snakemake starts `python` and `torchrun` through a shell, which has to find those of the environment.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Containers often forbid Python to keep what it has compiled; every one of a pipeline's many processes would do it anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install demo test test-all mutants bench lint format docs clean
.DELETE_ON_ERROR:

install: $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/snakemake
	$(BIN)/qwen3 summary config/config.yaml

# Those that measure the machine want it for themselves, after all others; these folders have them.
MEASURING := tests/calibrate tests/doctor
define run_tests
	@failed=0; \
	$(BIN)/pytest -n $(WORKERS) --no-loadscope-reorder -m "$(1)not measures" || failed=1; \
	$(BIN)/pytest $(MEASURING) -m "$(1)measures" || failed=1; \
	exit $$failed
endef

test: $(INSTALLED)
	$(call run_tests,not slow and )

test-all: $(INSTALLED)
	$(call run_tests)

mutants: $(INSTALLED)
	$(BIN)/python -m tests.mutants

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/snakemake --lint

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/snakefmt Snakefile workflow

docs: $(INSTALLED)
	$(BIN)/python -m tooling.docs

# The environment is made once, and again when a dependency changes. torch comes first and by itself: which
# build of it fits this machine is for pip and its index to decide, and nothing after it may replace it.
# DeepSpeed looks at it when it is built; none of its own CUDA code is compiled, since none is used.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing into $(VENV): about 2.5 GB, 1 to 10 minutes"
	$(PIP) pip setuptools packaging ninja
	$(PIP) torch==2.13.0
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

# Results stay: store/ and runs/ may hold days of work.
clean:
	rm -rf $(VENV) .snakemake .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find pipeline_lib tests -name __pycache__ -type d -prune -exec rm -rf {} +
