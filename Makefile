# Two commands matter: `make book` and `make test`. `make help` lists the rest.
PROFILE ?= laptop
RUN ?=
OUT ?= build/notebooks
# The first of these that runs and that the pinned packages support; name another with `make PYTHON=… book`.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && { echo $$p; break; }; done)
KVLIB = .venv/bin/python -m kvlib

.DEFAULT_GOAL := help
.PHONY: help book evidence test pdf watch notebooks fetch setup setup-test python clean distclean

help:
	@echo "make book                 environment, assets, the five notebooks, the book (PROFILE=laptop|quick|smoke, RUN=name)"
	@echo "make evidence             what the frozen map of a finished run is worth elsewhere, and why; then the book (PROFILE, RUN)"
	@echo "make test                 environment, then every test; offline once installed"
	@echo "make pdf                  the book of a finished run as one PDF; takes a Chromium (PROFILE, RUN)"
	@echo "make watch                build pages again as their scripts, charts or texts are edited; nothing is trained (PROFILE, RUN)"
	@echo "make notebooks            the notebooks as .ipynb files in $(OUT), for JupyterLab and papermill's own command"
	@echo "make fetch                only download the model and the text, and check their hashes"
	@echo "make clean                remove what is built (book, notebooks); runs, assets and the environment stay"
	@echo "make distclean            remove the environment and the downloads as well; runs (results/) stay"
	@echo "python -m kvlib --help    everything else, from inside the environment: . .venv/bin/activate"

book: setup
	@$(KVLIB) run --profile $(PROFILE) $(if $(RUN),--run $(RUN))

evidence: setup
	@$(KVLIB) evidence $(if $(RUN),$(RUN),--profile $(PROFILE))

# One process per core, four at most: each of them holds the libraries and a tiny model or two in memory.
test: setup-test
	@$(KVLIB) fetch
	@.venv/bin/python -m pytest -n auto --maxprocesses 4 --dist loadscope --no-loadscope-reorder

pdf: setup
	@$(KVLIB) pdf $(or $(RUN),$(PROFILE))

watch: setup
	@$(KVLIB) watch $(or $(RUN),$(PROFILE))

notebooks: setup
	@$(KVLIB) notebooks $(OUT)

fetch: setup
	@$(KVLIB) fetch

setup: python
	@$(PYTHON) tools/install.py

setup-test: python
	@$(PYTHON) tools/install.py --test

python:
	@command -v "$(firstword $(PYTHON))" >/dev/null 2>&1 || { \
		echo "no Python 3.11, 3.12 or 3.13 found, and the pinned packages need one of them: install python3.11 (and python3.11-venv on Debian and Ubuntu), or name one with 'make PYTHON=/path/to/python3.11 …'" >&2; exit 2; }

clean:
	rm -rf build book/_build book/chapters .pytest_cache .ruff_cache .hypothesis

distclean: clean
	rm -rf .venv .venv.lock .cache kvlib.egg-info
