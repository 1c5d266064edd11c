# Two commands need nothing but Python 3.11 or newer: `make demo` and `make test`. Both work in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# torch is named with its version so that the installer settles on it first; left to the dependencies, it may look at
# newer builds and fetch gigabytes of CUDA libraries for them. uv takes a tenth of pip's time, and does not read where
# pip is told to look for wheels; where there is no uv, pip does it all.
PIP = $(BIN)/python -m pip --disable-pip-version-check
WHEELS = $${PIP_FIND_LINKS-$$($(PIP) config get global.find-links 2>/dev/null)}
DEV = .[test,dev]
PACKAGES = -c constraints.txt torch==2.13.0 -e
UV = UV_FIND_LINKS="$(WHEELS)" $(BIN)/uv pip install --quiet --python $(BIN)/python
install = $(PIP) install --quiet -c constraints.txt uv && $(UV) $(PACKAGES) $(1) || $(PIP) install --no-compile $(PACKAGES) $(1)

# pip would compile file after file, the packages' own tests among them, uv nothing. What is left out is compiled when
# imported.
COMPILE = $(BIN)/python -m compileall -qq -j 2 -x /tests/ $(VENV)/lib || true

.PHONY: demo test tests slow-tests browser-test test-all test-cpus test-versions lint gpu-test bnb-tests docs clean

demo: $(VENV)/installed
	$(BIN)/halfbyte demo

# Style and types are checked beside the tests, whose summary ends the output. Tests marked `slow` and most cases of
# those marked `sampled` are left to slow-tests.
test: $(VENV)/installed-dev
	$(MAKE) --no-print-directory -j2 lint tests

tests: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu"

# What make test leaves out and needs no GPU.
slow-tests: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m "slow and not gpu"

# The board in a browser: needs the system's Chromium.
browser-test: $(VENV)/installed-dev
	$(PIP) install --quiet playwright axe-playwright-python
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/board/test_browser.py

# The suite as older CPUs would run it, one variant after the other (tests/helpers/cpus.py); CPUS=avx2 chooses.
test-cpus: lint
	$(BIN)/python -m tests.helpers.cpus $(CPUS)

# The suite with the oldest and the newest packages that pyproject.toml allows, in environments of their own, one after
# the other (tests/helpers/versions.py); ENDS=oldest chooses; CONTRIBUTING.md
test-versions: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.helpers.versions $(ENDS)

test-all: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

# A GPU machine brings its own torch build, so this one runs in PYTHON's environment instead of .venv. Failures and the
# seconds of tests are in GPU_LOG as they happen. The processes share the GPU (tests/conftest.py) and what they compile.
GPU_WORKERS ?= 14
GPU_LOG ?= .
gpu-test:
	PYTHONPATH=src:$(PYTHONPATH) OMP_NUM_THREADS=1 PYTORCH_ALLOC_CONF=expandable_segments:True \
	$(PYTHON) -m pytest -m gpu -n $(GPU_WORKERS) --dist worksteal -p no:benchmark --log-to=$(GPU_LOG) --durations 40

# bitsandbytes' own tests, unchanged, on the drop-in: BNB names a checkout of version 0.50.2. Its test_optim.py needs
# lion-pytorch. Left out: library loading, and generation from the hub.
bnb-tests:
	cd $(BNB) && PYTHONPATH=$(CURDIR)/src:$(PYTHONPATH) OMP_NUM_THREADS=1 $(if $(findstring /,$(PYTHON)),$(PYTHON),$(abspath $(BIN)/python)) \
	-m halfbyte.bitsandbytes -m pytest -q -p no:cacheprovider --continue-on-collection-errors tests \
	--ignore=tests/test_cuda_setup_evaluator.py --ignore=tests/test_generation.py $(BNB_ARGS)

# The documentation as a website in build/site. mkdocs-material announces MkDocs 2, which nothing here needs.
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -prune -exec rm -rf {} +

# The stamps make a second run skip pip; they go stale with what they depend on.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,.)
	$(COMPILE)
	touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,'$(DEV)')
	$(COMPILE)
	touch $(VENV)/installed $@

$(VENV)/installed-docs: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,'.[docs]')
	touch $@
