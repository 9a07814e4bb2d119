# Everything there is to type. Each target sets up what it needs, starting from
# a bare clone and Python 3.11, 3.12 or 3.13.

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
# The interpreter to make the environment with, if not the one that made it, nor
# the first of these on the path. Its version says which lock is installed.
PYTHON ?=
pythons := python3.11 python3.12 python3.13 python3

usable := import platform, sys; version = sys.version_info[:2]; \
  print('3.%d' % version[1]) if (3, 11) <= version <= (3, 13) \
  and platform.system() == 'Linux' and platform.machine() == 'x86_64' else ''
found := $(shell for candidate in $(or $(PYTHON),$(python) $(pythons)); do \
  version=$$("$$candidate" -c "$(usable)" 2>/dev/null) && [ -n "$$version" ] && \
  echo "$$candidate" "$$version" && break; done)
version := $(word 2,$(found))
# The lock of $(1), base, notebook, docs or ray, for a version of Python, $(2).
lock = requirements/$(1)-$(or $(2),3.11).txt

# The mark of a finished environment. Its name sums up the lock and the folder,
# so a changed lock or a moved checkout asks for a new environment, and touching
# a file does not. It is written last: an interrupted install leaves none.
made := $(environment)/.made-$(shell (pwd; cat $(call lock,base,$(version))) | cksum | cut -d ' ' -f 1)
# What lies on top of it sees its packages without changing any.
over_made = .venv-$(1)/.made-$(shell (pwd; cat $(call lock,base,$(version)) $(call lock,$(1),$(version))) | cksum | cut -d ' ' -f 1)
notebook_made := $(call over_made,notebook)
docs_made := $(call over_made,docs)
ray_made := $(call over_made,ray)
# The mark of our own package being installed in it.
installed := $(environment)/.installed-tff-partial

define no_python
No usable Python was found (tried: $(or $(PYTHON),$(pythons))).
The locked environments are for Python 3.11, 3.12 and 3.13 on Linux (x86-64), where
TensorFlow Federated 0.87 can be had. Install one, for instance with
    sudo apt install python3 python3-venv            (Debian, Ubuntu)
    uv python install 3.13                           (anywhere)
or say where yours is:
    make env PYTHON=/path/to/python3.13
endef
export no_python

.PHONY: help
help: ## say what can be made (the default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

.PHONY: env
env: $(installed) ## make the environment in .venv from the hashed lock
	@echo 'Ready: $(python)'

$(made):
	@if [[ -z '$(found)' ]]; then printf '%s\n' "$$no_python" >&2; exit 1; fi
	@# The interpreter outlives the folder that may hold a link to it.
	@base=$$($(firstword $(found)) -c \
	  'import os, sys; print(os.path.realpath(sys.executable))'); \
	echo "Making $(environment) with $$($$base --version): 2 GB, a minute or two."; \
	rm -rf $(environment); \
	"$$base" -m venv $(environment)
	@# The lock is complete, so no resolver is needed; it would refuse the
	@# override of TFF's jaxlib, and TFF itself on Python 3.12 and 3.13.
	@$(python) -m pip install --quiet --disable-pip-version-check \
	  --ignore-requires-python --no-deps --only-binary :all: --require-hashes \
	  -r $(call lock,base,$(version))
	@touch $@

$(installed): $(made) pyproject.toml setup.py
	@$(python) -m pip install --quiet --disable-pip-version-check \
	  --no-deps --no-build-isolation -e .
	@touch $@

# Makes .venv-$(1), whose packages come before those of .venv.
define over
@echo 'Making .venv-$(1): 300 MB, half a minute.'
@rm -rf .venv-$(1)
@$(python) -m venv --without-pip .venv-$(1)
@$(python) -c 'import sysconfig; \
  print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
  > .venv-$(1)/lib/python$(version)/site-packages/tff_partial_environment.pth
@$(python) -m pip --python .venv-$(1)/bin/python install --quiet \
  --disable-pip-version-check --no-deps --only-binary :all: \
  --require-hashes -r $(call lock,$(1),$(version))
@touch $@
endef

.PHONY: notebook
notebook: $(notebook_made) ## start JupyterLab, which lies in .venv-notebook
	.venv-notebook/bin/jupyter lab $(ARGS)

$(notebook_made): $(installed)
	$(call over,notebook)

.PHONY: notebooks
notebooks: $(notebook_made) ## run all notebooks; what they show goes to build/notebooks
	@mkdir -p build/notebooks
	.venv-notebook/bin/jupyter nbconvert --to notebook --execute \
	  --output-dir build/notebooks notebooks/*.ipynb

.PHONY: docs
docs: $(docs_made) ## build the pages of documentation in build/docs, with their search
	.venv-docs/bin/python -m sphinx --fail-on-warning --keep-going \
	  --doctree-dir build/doctrees docs build/docs
	@echo 'Open build/docs/index.html.'

$(docs_made): $(installed)
	$(call over,docs)

.PHONY: ray
ray: $(ray_made) ## run the tests of the Ray runtime; Ray lies in .venv-ray
	.venv-ray/bin/python -m pytest tests/runtimes/ray_workers_test.py $(ARGS)

$(ray_made): $(installed)
	$(call over,ray)

.PHONY: demo
demo: $(installed) ## federated reconstruction on built-in synthetic data
	@rm -rf output/demo
	@$(environment)/bin/tff-partial train --recipe=demo
	@echo
	@echo 'These ratings were invented. With those of MovieLens 1M, the paper'\''s recipe is'
	@echo '  $(environment)/bin/tff-partial train --recipe=movielens_fed_recon \'
	@echo '      --output_dir=output/movielens --data_dir=DIR --download'
	@echo 'where DIR/movielens/ml-1m holds the data, or shall hold them.'

.PHONY: test
test: $(installed) ## run the quick tests
	$(python) -m pytest $(side_by_side) -m 'not slow' $(ARGS)

# In parts, each in new processes: what tests have traced stays in memory, and all
# of it takes 12 GB a process.
parts := 'tests/house tests/tasks' 'tests/laws tests/algebra tests/algorithms' \
  'tests $(addprefix --ignore=tests/,house tasks laws algebra algorithms)'
.PHONY: test-all
test-all: $(installed) ## run all tests, the slow ones too
	@failed=0; for part in $(parts); do \
	  $(python) -m pytest $(side_by_side) $$part $(ARGS) || [[ $$? == 5 ]] || failed=1; \
	done; exit $$failed

# TFF's own tests do not come with TFF: TFF_SOURCE is a checkout of the version
# that is installed.
TFF_SOURCE ?=
.PHONY: foreign
foreign: $(installed) ## run TFF's own tests, of TFF_SOURCE=DIR, on our runtime
	@[[ -n '$(TFF_SOURCE)' ]] || { \
	  echo "make foreign needs TFF_SOURCE=DIR, a checkout of TFF's sources." >&2; exit 1; }
	$(python) -m tests.foreign $(TFF_SOURCE) $(ARGS)

# Checkouts of other implementations, and a Python with what they need; with
# neither, it says what is missing.
REFERENCE_SOURCES ?=
REFERENCE_PYTHON ?= $(python)
.PHONY: references
references: $(installed) ## compare with other implementations, of REFERENCE_SOURCES=DIR
	@[[ -n '$(REFERENCE_SOURCES)' ]] || { \
	  echo 'make references needs REFERENCE_SOURCES=DIR, which holds checkouts of others.'; \
	  $(python) -m tests.references --help; exit 1; } >&2
	$(python) -m tests.references $(REFERENCE_SOURCES) --python=$(REFERENCE_PYTHON) $(ARGS)

# In the order of benchmarks/README.md.
benchmarks := movielens_round 'movielens_round --full' mnist_cnn lstm_step \
  aggregators scaling startup endurance stateful_round sparse_rows accounting \
  kernel_threads client_tables million_clients next_word_step devices many_sentences \
  next_word_round references_cnn reconstruct populations

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
	$(python) -m mypy $(sort $(dir $(wildcard $(addsuffix /*.py,baselines tff_partial tff_partial_programs tasks benchmarks distribution))))
	$(python) -m pytest -q tests/house/imports_test.py tests/house/house_rules_test.py tests/house/build_test.py

.PHONY: dist
dist: $(installed) ## build wheels in dist/: ours, and TFF with pins that pip can meet
	@rm -rf dist
	@$(python) -m pip wheel --quiet --disable-pip-version-check --no-deps \
	  --no-build-isolation --wheel-dir dist .
	@$(python) -m distribution.relaxed_wheels dist
	@echo
	@echo 'Install them on Python 3.11 to 3.13, with what they need from the index:'
	@echo '  pip install tff-partial -f dist'

.PHONY: format
format: $(installed) ## format the code and sort its imports
	$(python) -m ruff check --select I --fix .
	$(python) -m ruff format .

.PHONY: clean
clean: ## remove caches and build outputs, but not .venv
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(environment) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# Re-makes a lock, $(1), for a version of Python, $(2), from its source, $(3), with
# more arguments for uv, $(4). The header, which ends with the first empty line, stays
# as it is.
define compile
@mkdir -p build && cp $(1) build/lock.txt
$(UV) pip compile $(3) --override requirements/overrides.txt $(4) $(UV_ARGS) \
  --python-version $(2) --python-platform x86_64-manylinux_2_31 \
  --only-binary :all: --generate-hashes --no-emit-index-url --no-header \
  --output-file build/lock.txt >/dev/null
@{ sed '/^$$/q' $(1); cat build/lock.txt; } > build/new_lock.txt
@mv build/new_lock.txt $(1)
endef
# What is in the environment already is not locked twice.
define compile_over
$(call compile,$(call lock,$(1),$(2)),$(2),requirements/$(1).in,--constraint \
  $(call lock,base,$(2)) \
  $$(sed -n 's/^\([A-Za-z0-9._-]*\)==.*/--no-emit-package \1/p' $(call lock,base,$(2))))
endef
# Packages whose metadata keep them off later Pythons are the same files there.
define compile_later
$(call compile,$(call lock,base,$(1)),$(1),requirements/base.in)
@for package in tensorflow-federated tensorflow-privacy dp-accounting; do \
  sed -n "/^$$package==/,/^[a-z]/{/^$$package==/p;/^ .*--hash/p}" $(call lock,base,3.11); \
done >> $(call lock,base,$(1))
$(call compile_over,notebook,$(1))
$(call compile_over,docs,$(1))
$(call compile_over,ray,$(1))
endef

.PHONY: lock
lock: ## re-make the locks with uv from requirements/*.in and their overrides.txt
	@command -v $(UV) >/dev/null || { \
	  echo 'make lock needs uv (pip install uv), or UV=/path/to/uv.' >&2; exit 1; }
	$(call compile,$(call lock,base,3.11),3.11,requirements/base.in)
	$(call compile_over,notebook,3.11)
	$(call compile_over,docs,3.11)
	$(call compile_over,ray,3.11)
	$(call compile_later,3.12)
	$(call compile_later,3.13)
