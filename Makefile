# Everything runs in .venv, which the first target that needs it creates; the tests of timm in .venv-timm. PYTHON names another interpreter (3.10 or newer).
PYTHON ?= python3
WORKERS ?= 2
FUZZ_CASES ?= 100000

VENV := .venv
BIN := $(VENV)/bin
LAB := $(VENV)/.installed-lab
STAMP := $(VENV)/.installed
TIMM := $(VENV)-timm/.installed

# pip obeys constraints.txt, in the isolated build of the package too (the second name is that of pip 25.3 and later).
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help venv demo test check slow sanitize gpu-check gpu-test bench studies docs clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP)  ## create .venv with all that demo and tests need

# The demo needs the lab alone; tests need every library that coneheads goes into.
$(LAB): pyproject.toml constraints.txt
	@echo "==> creating $(VENV) and installing coneheads (a minute or two the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "coneheads needs Python 3.10 or newer; try: make PYTHON=python3.11")'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --editable ".[lab]"
	@touch $@

$(STAMP): $(LAB)
	@echo "==> installing the tools and libraries that the tests need (a minute or two the first time)"
	@$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@

# timm needs torchvision, whose build for CUDA, the only one on PyPI for Linux, cannot be imported beside a torch for the CPU, and then
# breaks transformers and diffusers too. So both stand in an environment of their own, which sees all else that .venv has.
$(TIMM): $(STAMP)
	@echo "==> creating $(VENV)-timm for the tests of timm"
	@$(BIN)/python -m venv --without-pip $(VENV)-timm
	@$(BIN)/python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
		> "$$($(VENV)-timm/bin/python -c 'import site; print(site.getsitepackages()[0])')/base.pth"
	@$(BIN)/python -m pip --python $(VENV)-timm/bin/python install --quiet "timm>=1.0.26"
	@touch $@

demo: $(LAB)  ## train dot product and cones on a hierarchical task, side by side: a table and a report page (3 minutes)
	@echo "==> running coneheads compare"
	@$(BIN)/coneheads compare

test: $(STAMP) $(TIMM)  ## run the tests, without the slow ones
	@echo "==> running the tests on $(WORKERS) workers"
	@$(BIN)/python -m pytest -q -n $(WORKERS) -m "not slow"
	@echo "==> running the tests of timm in $(VENV)-timm"
	@$(VENV)-timm/bin/python -m pytest -q -n $(WORKERS) tests/integrations/test_timm.py

check: $(STAMP)  ## lint, check format and types, run the tests
	@echo "==> linting"
	@$(BIN)/ruff check .
	@echo "==> checking the format"
	@$(BIN)/ruff format --check .
	@echo "==> checking types"
	@$(BIN)/mypy
	@$(MAKE) --no-print-directory test

slow: $(STAMP)  ## run the slow tests and a fuzz of FUZZ_CASES cases
	@echo "==> running the slow tests"
	@$(BIN)/python -m pytest -q -m slow
	@echo "==> fuzzing $(FUZZ_CASES) cases"
	@$(BIN)/python -m pytest -q -n $(WORKERS) tests/test_fuzz.py --fuzz-cases $(FUZZ_CASES)

# The library needs the runtime of the sanitizers first in the process, and that needs libstdc++ beside it; the compiler needs neither.
# Reports go past pytest's capture, which would swallow them when the process ends. Leaks are not looked for: Python and torch have many.
sanitize: export CONEHEADS_CXXFLAGS := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1
sanitize: export CONEHEADS_CACHE := $(CURDIR)/outputs/sanitize
sanitize: export ASAN_OPTIONS := detect_leaks=0
sanitize: export UBSAN_OPTIONS := print_stacktrace=1
sanitize: SANITIZED = CXX="env -u LD_PRELOAD $(CXX)" \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" $(BIN)/python
sanitize: $(STAMP)  ## run the tests of the C++ kernels under the address and undefined-behaviour sanitizers
	@echo "==> compiling the kernels with sanitizers"
	@$(SANITIZED) -c "from coneheads.backends import build; build.load()"
	@echo "==> testing them"
	@$(SANITIZED) -m pytest -q --capture=sys -p no:faulthandler -p no:xdist tests/backends/test_cpp.py
	@$(SANITIZED) -m pytest -q --capture=sys -p no:faulthandler -p no:xdist tests/test_fuzz.py --fuzz-cases 500

gpu-check: $(STAMP)  ## compile the kernels for GPUs ahead of time: registers, spills, shared memory (no GPU needed), with the flags in GPU
	@echo "==> compiling the Triton kernels"
	@$(BIN)/python -m coneheads.lab.gpu_check $(GPU)

gpu-test: $(STAMP)  ## test and time the kernels on the GPU of this machine
	@echo "==> running coneheads info --self-test"
	@$(BIN)/coneheads info --self-test

bench: $(STAMP)  ## time attention beside SDPA and others, with the flags in BENCH; results in benchmarks/results/
	@echo "==> running coneheads bench $(BENCH)"
	@$(BIN)/coneheads bench $(BENCH)

studies: $(STAMP)  ## train again what README and docs/tuning.md quote (an hour), with the flags in STUDIES
	@echo "==> running docs/studies.py $(STUDIES)"
	@$(BIN)/python docs/studies.py $(STUDIES)

docs: $(STAMP)  ## regenerate the tables and figures of README and docs
	@echo "==> writing the generated tables"
	@$(BIN)/python docs/generate.py
	@echo "==> drawing the figures"
	@$(BIN)/python docs/figures/draw_cones.py
	@$(BIN)/python examples/quickstart.py --out docs/figures/quickstart.png
	@echo "==> measuring errors, memory and time (some minutes)"
	@$(BIN)/python docs/measure_errors.py

clean:  ## remove .venv, outputs and caches
	@echo "==> removing $(VENV), $(VENV)-timm, outputs and caches"
	@rm -rf $(VENV) $(VENV)-timm outputs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	@find src tests docs examples -name __pycache__ -type d -prune -exec rm -rf {} +
