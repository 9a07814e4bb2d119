# Everything there is to type. Each target sets up what it needs, starting from
# a bare clone and Python 3.11.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

environment := .venv
python := $(environment)/bin/python

# More arguments for pytest: make test ARGS='-k tiers'
ARGS ?=
# Test files run side by side, on up to four cores; each in one process, since
# its tests share what they trace. A test that hangs or prints: make test WORKERS=0
WORKERS ?= auto
side_by_side := -n $(WORKERS) --maxprocesses=4 --dist=loadfile
# The uv that re-makes the lock, and more arguments for it: make lock UV_ARGS=--upgrade
UV ?= uv
UV_ARGS ?=
# The interpreter to make the environment with, if not the first 3.11 on the path.
PYTHON ?=

# The mark of a finished environment. Its name sums up the lock and the folder,
# so a changed lock or a moved checkout asks for a new environment, and touching
# a file does not. It is written last: an interrupted install leaves none.
made := $(environment)/.made-$(shell (pwd; cat requirements.txt) | cksum | cut -d ' ' -f 1)
# JupyterLab lies on top of it, and sees its packages without changing any.
notebook := .venv-notebook
notebook_made := $(notebook)/.made-$(shell (pwd; cat requirements.txt requirements-notebook.txt) | cksum | cut -d ' ' -f 1)
# The mark of our own package being installed in it.
installed := $(environment)/.installed-tff-partial

define no_python
No usable Python 3.11 was found (tried:$(if $(PYTHON), $(PYTHON)) python3.11 python3).
The locked environment is for Python 3.11 on Linux (x86-64), where everything
that TensorFlow Federated 0.87 pins can be had. Install one, for instance with
    sudo apt install python3.11 python3.11-venv      (Debian, Ubuntu)
    uv python install 3.11                           (anywhere)
or say where yours is:
    make env PYTHON=/path/to/python3.11
endef
export no_python

is_usable := import platform, sys; sys.exit( \
  sys.version_info[:2] != (3, 11) or platform.system() != 'Linux' \
  or platform.machine() != 'x86_64')

.PHONY: help
help: ## say what can be made (the default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' Makefile

.PHONY: env
env: $(installed) ## make the environment in .venv from the hashed lock
	@echo 'Ready: $(python)'

$(made):
	@found=; \
	for candidate in $(PYTHON) python3.11 python3; do \
	  if "$$candidate" -c "$(is_usable)" >/dev/null 2>&1; then \
	    found=$$candidate; break; \
	  fi; \
	done; \
	if [[ -z "$$found" ]]; then printf '%s\n' "$$no_python" >&2; exit 1; fi; \
	echo "Making $(environment) with $$($$found --version): 2 GB, a minute or two."; \
	rm -rf $(environment); \
	"$$found" -m venv $(environment)
	@# The lock is complete, so no resolver is needed, and it would refuse the
	@# override of TFF's jaxlib.
	@$(python) -m pip install --quiet --disable-pip-version-check \
	  --no-deps --only-binary :all: --require-hashes -r requirements.txt
	@touch $@

$(installed): $(made) pyproject.toml setup.py
	@$(python) -m pip install --quiet --disable-pip-version-check \
	  --no-deps --no-build-isolation -e .
	@touch $@

.PHONY: notebook
notebook: $(notebook_made) ## start JupyterLab, which lies in .venv-notebook
	$(notebook)/bin/jupyter lab $(ARGS)

$(notebook_made): $(installed)
	@echo 'Making $(notebook): 300 MB, half a minute.'
	@rm -rf $(notebook)
	@$(python) -m venv --without-pip $(notebook)
	@# Packages of .venv, our own too; those of the folder itself come first.
	@$(python) -c 'import sysconfig; \
	  print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $(notebook)/lib/python3.11/site-packages/tff_partial_environment.pth
	@$(python) -m pip --python $(notebook)/bin/python install --quiet \
	  --disable-pip-version-check --no-deps --only-binary :all: \
	  --require-hashes -r requirements-notebook.txt
	@touch $@

.PHONY: demo
demo: $(installed) ## federated reconstruction on built-in synthetic data
	@rm -rf output/demo
	@$(python) -m tasks.train --flagfile=tasks/recipes/demo.flags
	@echo
	@echo 'These ratings were invented. With those of MovieLens 1M, the paper'\''s recipe is'
	@echo '  $(python) -m tasks.train --flagfile=tasks/recipes/movielens_fed_recon.flags \'
	@echo '      --output_dir=output/movielens --data_dir=DIR --download'
	@echo 'where DIR/movielens/ml-1m holds the data, or shall hold them.'

.PHONY: test
test: $(installed) ## run the quick tests
	$(python) -m pytest $(side_by_side) -m 'not slow' $(ARGS)

.PHONY: test-all
test-all: $(installed) ## run all tests, the slow ones too
	$(python) -m pytest $(side_by_side) $(ARGS)

# TFF's own tests do not come with TFF: TFF_SOURCE is a checkout of the version
# that is installed.
TFF_SOURCE ?=
.PHONY: foreign
foreign: $(installed) ## run TFF's own tests, of TFF_SOURCE=DIR, on our runtime
	@[[ -n '$(TFF_SOURCE)' ]] || { \
	  echo "make foreign needs TFF_SOURCE=DIR, a checkout of TFF's sources." >&2; exit 1; }
	$(python) -m tests.foreign $(TFF_SOURCE) $(ARGS)

# In the order of benchmarks/README.md.
benchmarks := movielens_round 'movielens_round --full' mnist_cnn lstm_step \
  aggregators scaling startup endurance stateful_round sparse_rows accounting \
  kernel_threads client_tables

.PHONY: bench
bench: $(installed) ## run all benchmarks, one after the other
	@for benchmark in $(benchmarks); do \
	  echo "$(python) -m benchmarks.$$benchmark"; \
	  $(python) -m benchmarks.$$benchmark; \
	  echo; \
	done

# The last line reads the sources only, so it takes a second.
.PHONY: lint
lint: $(installed) ## check style, types, floors and house rules
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy $(sort $(dir $(wildcard $(addsuffix /*.py,tff_partial tff_partial_programs tasks benchmarks))))
	$(python) -m pytest -q tests/imports_test.py tests/house_rules_test.py tests/build_test.py

.PHONY: format
format: $(installed) ## format the code and sort its imports
	$(python) -m ruff check --select I --fix .
	$(python) -m ruff format .

.PHONY: clean
clean: ## remove caches and build outputs, but not .venv
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(environment) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# Re-makes a lock from its source, $(1).in, with more arguments for uv, $(2). The
# header, which ends with the first empty line, stays as it is.
define compile
@mkdir -p build && cp $(1).txt build/lock.txt
$(UV) pip compile $(1).in --override overrides.txt $(2) $(UV_ARGS) \
  --python-version 3.11 --python-platform x86_64-manylinux_2_31 \
  --only-binary :all: --generate-hashes --no-emit-index-url --no-header \
  --output-file build/lock.txt >/dev/null
@sed '/^$$/q' $(1).txt > build/$(1).txt
@cat build/lock.txt >> build/$(1).txt
@mv build/$(1).txt $(1).txt
endef

.PHONY: lock
lock: ## re-make the locks with uv from requirements*.in and overrides.txt
	@command -v $(UV) >/dev/null || { \
	  echo 'make lock needs uv (pip install uv), or UV=/path/to/uv.' >&2; exit 1; }
	$(call compile,requirements)
	@# What is in the environment already is not locked twice.
	$(call compile,requirements-notebook,--constraint requirements.txt \
	  $$(sed -n 's/^\([A-Za-z0-9._-]*\)==.*/--no-emit-package \1/p' requirements.txt))
