# `make run` and `make test` set up all they need; a second call does no set-up again.
SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
DONE := $(VENV)/.done
JOBS ?= 2
# Tests wait a fifth of their time for processes that they start: one worker more than there are cores.
WORKERS ?= $(shell expr $(JOBS) + 1)

# Each of JOBS workers on a core of its own: libraries that take all cores would wait for each other.
ONE_THREAD := OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1

# `make test K=mhc` runs what belongs to kernels/mhc: all of its tests, and the notebooks that import it.
K ?=
LONG := $(if $(K),--runlong)
$(if $(K),$(if $(wildcard kernels/$(K)),,$(error K=$(K): expected a folder of kernels/)))
TESTS := $(if $(K),$(wildcard tests/kernels/test_$(K)*.py),tests)
BOOKS := $(if $(K),$(shell grep -l "kernels.$(K)[ .]" notebooks/*.ipynb),notebooks)

# Code lines that each package may have; the aims are 1,600 and 5,000. The search for causes has both its list of
# mutations and what does without one: it is 1,000 lines over its own aim of 1,300.
BUDGETS := labkit=1612 whywrong=10448

# Wheels for another machine: its Python, and whether torch, Triton, NumPy, SciPy, numba and safetensors go along.
PYTHON ?= 3.12
WITH_TORCH ?=
PLATFORMS := manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_24_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 \
	manylinux_2_12_x86_64 manylinux2010_x86_64 manylinux_2_5_x86_64 manylinux1_x86_64
DOWNLOAD = $(BIN)/pip download -qq -d wheelhouse -c constraints.txt --only-binary=:all: --implementation cp \
	--python-version $(PYTHON) $(addprefix --platform ,$(PLATFORMS))

# Where it is set, each of some hundred processes would compile what it imports again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup run test lint pytest nbval test-all test-slow lab refresh book docs wheelhouse clean

run: setup
	@$(BIN)/labkit run --jobs $(JOBS)

test: lint pytest nbval

pytest: setup
	@$(ONE_THREAD) $(BIN)/pytest -n $(WORKERS) --dist worksteal -p no:nbval $(LONG) $(TESTS)

# What CI leaves out too, half an hour of it: before a release, and after a change of what many things rest on.
test-all: LONG := --runlong
test-all: test

nbval: setup
	@$(if $(BOOKS),$(ONE_THREAD) $(BIN)/pytest -n $(WORKERS) --dist loadfile --nbval-lax --nbval-current-env \
		--nbval-cell-timeout=300 $(BOOKS))

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m tools.code_lines $(BUDGETS)

# With the slow tests, hours of them; what they find is recorded under data/results.
test-slow: lint
	@$(ONE_THREAD) $(BIN)/pytest -n $(JOBS) --dist worksteal -p no:nbval --runslow

# On copies in lab/, which git ignores: an autosave changes no notebook that is committed. ARGS are for Jupyter, such as
# ARGS="--port 8899 --no-browser". Root, as in a container, may run it: it listens on 127.0.0.1 and asks for its token.
# Lab asks for no news and looks for no new version.
lab: setup
	@mkdir -p lab $(VENV)/etc/jupyter/labconfig && cp -n notebooks/*.ipynb lab/
	@echo '{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": false}}' \
		> $(VENV)/etc/jupyter/labconfig/default_setting_overrides.json
	@echo "Copies are in lab/. To take one back: cp lab/NAME.ipynb notebooks/ && make refresh. To begin again: rm -r lab"
	@LABKIT_NOTEBOOKS=$(CURDIR)/lab $(BIN)/jupyter lab lab --ip=127.0.0.1 $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS)

# Executed in place, as a reader would in Lab; figures and verdicts are committed with them.
refresh: setup
	@$(BIN)/jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False notebooks/*.ipynb
	@$(BIN)/python -m tools.pictures notebooks/*.ipynb
	@$(BIN)/python -m tools.readme_figures
	@$(BIN)/python -m tools.answers
	@$(BIN)/python -m tools.operations
	@$(BIN)/python -m tools.causes

# The committed notebooks under their recorded results, as pages that need no server: book/index.html.
book: setup
	@$(BIN)/python -m tools.book book

# The site: build/site/docs/index.html. Notebooks as they are committed; a warning is an error.
docs: setup
	@$(BIN)/sphinx-build -q -W --keep-going -c docs . build/site
	@echo "written: build/site/docs/index.html"

setup: $(DONE)

# uv, which takes a third of pip's time, where it is there or can be had; from where pip is configured to take packages.
$(DONE): pyproject.toml labkit/pyproject.toml constraints.txt
	@command -v git >/dev/null || { echo "make: git is missing; install it (Debian: apt-get install git)"; exit 1; }
	@command -v c++ >/dev/null || { echo "make: a C++ compiler is missing; install one (Debian: apt-get install g++)"; exit 1; }
	@for name in $(INTERPRETER) python3 python3.13 python3.12 python3.11 python3.14; do \
		if $$name -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then found=$$name; break; fi; \
	done; \
	[ -n "$$found" ] || { echo "make: Python 3.11 to 3.14 is missing; install one, or name it: make INTERPRETER=/path/to/python3.12"; exit 1; }; \
	$$found -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $$found has no venv module; install it (Debian: apt-get install python3-venv)"; exit 1; }; \
	echo "setting up $(VENV) with $$($$found --version); this happens once"; \
	$$found -m venv --clear $(VENV)
	@extras=lab,sweep,docs; nvidia-smi -L >/dev/null 2>&1 && extras=$$extras,gpu; \
	pip="$(BIN)/python -m pip"; install="$$pip install -q --disable-pip-version-check"; \
	uv=$$(command -v uv) || { $$install -c constraints.txt uv 2>/dev/null && uv=$(BIN)/uv; }; \
	if [ -n "$$uv" ]; then \
		of() { $$pip config get global.$$1 2>/dev/null || $$pip config get :env:.$$1 2>/dev/null; }; \
		links=$$(of find-links) && export UV_FIND_LINKS="$$links"; \
		more=$$(of extra-index-url) && export UV_EXTRA_INDEX_URL="$$more"; \
		index=$$(of index-url) && export UV_DEFAULT_INDEX="$$index"; \
		export UV_INDEX_STRATEGY=unsafe-best-match; install="$$uv pip install -q --python $(BIN)/python"; \
	fi; \
	$$install -c constraints.txt -e ".[fuzz,page,lab,dev]" -e "./labkit[$$extras]"
	@touch $(DONE)

wheelhouse: setup
	@rm -rf wheelhouse
	@$(DOWNLOAD) papermill nbclient nbconvert nbformat ipykernel math-core matplotlib pyyaml threadpoolctl pytest nbval aiohttp \
		detect-secrets omegaconf tokenizers tqdm transformers \
		$(if $(WITH_TORCH),torch triton scipy numba safetensors)
	@$(DOWNLOAD) --no-deps nvmath-python cuda-core
	@$(if $(WITH_TORCH),,rm -f wheelhouse/numpy-*.whl)
	@du -sh wheelhouse

clean:
	@rm -rf $(VENV) wheelhouse runs book build *.egg-info labkit/*.egg-info
