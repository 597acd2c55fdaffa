# Every target sets up what it needs in .venv, where a stamp file records each finished step, which is then skipped.
#
#   make reproduce PROFILE=quick RESULTS=elsewhere     make test PYTHON=python3.12     make bench RANGE=HEAD~3..HEAD

PYTHON  ?= python3
VENV    ?= .venv
PROFILE ?=
RESULTS ?=
RANGE   ?= HEAD^!
BASE    ?= HEAD~1
HISTORY ?= HEAD~120..HEAD
STEPS   ?= 14
POINTS  ?= 12
SEED    ?= random
JULIA   ?=
TAG     ?=
ARGS    ?=

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
# pip leaves the compiling of modules to their first import (see below): if Python may not keep what it compiles, each of
# the hundreds of processes of the tests compiles all that it imports anew, for TensorFlow a quarter of a minute.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help reproduce sizes curves test campaign lint docs bench bench-compare bench-history site release clean

# Paths may hold spaces: in recipes they are quoted, in names of targets escaped.
EMPTY :=
HERE := $(if $(filter /%,$(firstword $(VENV))),,$(CURDIR)/)$(VENV)
STAMPS := $(subst $(EMPTY) ,\ ,$(VENV))
BIN := $(VENV)/bin
PIP := "$(BIN)/python" -m pip
# asv builds its own environments: with this Python and these versions (a URL, since the path may hold spaces).
ASV := PATH="$(HERE)/bin:$$PATH" \
	PIP_CONSTRAINT="file://$(subst $(EMPTY) ,%20,$(CURDIR))/constraints.txt" "$(BIN)/python" -m asv

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  Variables: PYTHON=$(PYTHON) VENV=$(VENV) PROFILE=full|quick RESULTS=folder RANGE=a..b BASE=commit" \
	  && echo "             HISTORY=a..b STEPS=commits POINTS=number JULIA=program TAG=v1.2.3 DASK=address" \
	  && echo "             SEED=number|random ARGS=options" \
	  && echo "  POINTS: how many points a graph of bench-history is to have. SEED: of the draws of campaign, which prints it." \
	  && echo "  ARGS: more options for the program that a target runs: twingrad (reproduce, sizes), pytest (test, campaign)," \
	  && echo "        asv (bench, bench-compare, bench-history) or experiments.curves (curves)."

# What the studies say of first epochs includes compilation, whatever image `make test` or the user has made.
reproduce: export TWINGRAD_SYSIMAGE ?= 0
reproduce: $(STAMPS)/.run ## raw data to the finished paper: train, measure, tables, figures, page, PDF
	"$(BIN)/python" -m contrib.julia || echo "Continuing without the Julia engine; its rows will say so."
	"$(BIN)/twingrad" reproduce $(if $(PROFILE),--profile "$(PROFILE)") $(if $(RESULTS),--results "$(RESULTS)") \
	  $(if $(DASK),--dask "$(DASK)") $(ARGS)
	"$(BIN)/python" -m experiments.curves

sizes: $(STAMPS)/.run ## networks of ordinary sizes in all engines, raced beside the machine's limit: hours, resumable
	"$(BIN)/python" -m contrib.julia --image || echo "Continuing without the Julia engine or its image; its rows will say so."
	"$(BIN)/twingrad" run sizes $(if $(PROFILE),--profile "$(PROFILE)") --results "$(or $(RESULTS),results)" $(ARGS)
	"$(BIN)/twingrad" report --results "$(or $(RESULTS),results)"

curves: $(STAMPS)/.run ## a small transformer and a residual network, trained in five engines to the same losses
	"$(BIN)/python" -m experiments.curves $(ARGS)

# On a fresh machine each of pytest's three workers, and of the engines' first ones, would compile all modules of the tests
# and of the frameworks, so one does it before.
WARM_UP = [ -e tests/__pycache__ ] || { "$(BIN)/python" -m pytest --collect-only --quiet > /dev/null \
	  && "$(BIN)/python" -c 'import jax, tensorflow' 2> /dev/null; } || true

# The Julia engine is compiled beside what needs no Julia: the rest of the set-up, the linters and the first tests. Where
# Julia is older than 1.9, that makes a system image, which takes less time than the tests save by it. It holds a lock,
# for which the tests marked `julia` wait.
test: $(STAMPS)/.base ## ruff, mypy and all tests; with JULIA=program those that use Julia, on that one
	@$(if $(JULIA),export TWINGRAD_JULIA="$(JULIA)";) \
	"$(BIN)/python" -m contrib.julia; \
	export TWINGRAD_TEST_WAITS_FOR="$(HERE)/.julia"; \
	exec 9> "$$TWINGRAD_TEST_WAITS_FOR"; \
	flock 9; \
	setsid env --default-signal=INT bash -c '"$$0" -m contrib.julia --image \
	  && "$$0" -c "from bridge.libjulia import engine; engine.prepare()"' "$(BIN)/python" \
	  > "$(VENV)/julia.log" 2>&1 & julia=$$!; \
	trap 'kill -INT -- -$$julia 2> /dev/null && wait $$julia || true' EXIT; \
	trap 'exit 130' INT TERM; \
	exec 9>&-; \
	echo "Compiling the Julia engine beside all that needs none: see $(VENV)/julia.log"; \
	$(MAKE) --no-print-directory "$(VENV)/.dev"; \
	$(MAKE) --no-print-directory lint & lint=$$!; \
	$(if $(JULIA),,bash tests/install_browser.sh;) \
	$(WARM_UP); \
	wait $$lint; \
	tests=0; \
	"$(BIN)/python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations 10 \
	  $(if $(JULIA),-m julia) $(ARGS) || tests=$$?; \
	wait $$julia || { cat "$(VENV)/julia.log" >&2; exit 1; }; \
	exit $$tests

campaign: $(STAMPS)/.dev ## the random tests, killed runs among them, with a hundred times the draws of `make test`: hours
	TWINGRAD_TEST_PROFILE=campaign "$(BIN)/python" -m pytest -n 2 --dist loadfile -m campaign --seed "$(SEED)" $(ARGS)

lint: $(STAMPS)/.dev ## ruff, mypy, and the schema of the workflows
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/check-jsonschema" --builtin-schema vendor.github-workflows .github/workflows/*.yml
	"$(BIN)/mypy"

docs: $(STAMPS)/.dev ## the API reference, the table of ops and the tutorial as web pages, in build/docs
	"$(BIN)/twingrad" docs build/docs

bench: $(STAMPS)/.dev ## speed and memory of HEAD, or of RANGE=a..b, as web pages in .asv/html
	@said=$$($(ASV) machine --yes 2>&1) || { echo "$$said" >&2; exit 1; }
	$(ASV) run --launch-method spawn --show-stderr $(ARGS) '$(RANGE)'
	$(ASV) publish
	@echo 'To look at .asv/html: "$(BIN)/python" -m asv preview'

bench-compare: $(STAMPS)/.dev ## compare HEAD with BASE=commit; fails where HEAD is slower
	@said=$$($(ASV) machine --yes 2>&1) || { echo "$$said" >&2; exit 1; }
	$(ASV) continuous --launch-method spawn --show-stderr $(ARGS) '$(BASE)' HEAD

# What a few engines need for a step, and allocate: one to two minutes for a commit. What has been measured is not measured again.
CHOICE := --bench "^training\.Epoch\..*\('(numpy|julia|torch)', [12]\)" \
	--bench "^training\.Convolutional\..*\('(numpy|julia|torch)', '(mnist|imdb)-cnn'\)" \
	--bench "^memory\.Allocated\..*\('(numpy|julia|torch)'\)" \
	--attribute repeat=3 --attribute rounds=1 --skip-existing-successful

bench-history: $(STAMPS)/.dev ## a few benchmarks of STEPS commits of HISTORY=a..b, as web pages in .asv/html
	@said=$$($(ASV) machine --yes 2>&1) || { echo "$$said" >&2; exit 1; }
	$(ASV) run --launch-method spawn --steps $(STEPS) $(CHOICE) $(ARGS) '$(HISTORY)'
	$(ASV) publish
	@bash tests/install_browser.sh
	-"$(BIN)/python" tests/benchmark_pages.py .asv/html $(POINTS)
	@echo 'To look at .asv/html: "$(BIN)/python" -m asv preview'

site: docs ## the pages of `make docs`, made here, and of `make bench`, if there are any, in one folder, build/site
	rm -rf build/site
	mkdir -p build/site
	cp -r build/docs/. build/site
	$(if $(wildcard .asv/html),cp -r .asv/html build/site/speed)

release: $(STAMPS)/.run ## what a release has: packages, PDF, page and raw results in build/release; TAG=v1.2.3 checks the version
	rm -rf build/release build/report
	mkdir -p build/release
	"$(BIN)/python" tests/release_notes.py $(TAG) > build/release-notes.md
	"$(BIN)/python" -m hatchling build -d build/release
	"$(BIN)/twingrad" paper --results paper/results --output build/release/paper.pdf
	"$(BIN)/twingrad" report --results paper/results --output build/report
	cp build/report/report.html paper/results/raw.tar.xz build/release

clean: ## remove .venv (with juliapkg's Julia), build and tools' caches; results, data, .asv and the user's cache stay
	rm -rf "$(VENV)" build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -not -path './.asv/*' -prune -exec rm -rf {} +

# --- the environment -------------------------------------------------------------------------------------------

# The first of $(PYTHON), python3 and python3.x that is new enough; a PYTHON named by the user is not replaced.
CANDIDATES := "$(PYTHON)" $(if $(filter file default undefined,$(origin PYTHON)),python3.13 python3.12 python3.11 python3.14)

$(STAMPS)/.venv:
	@for python in $(CANDIDATES); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found="$$python"; break; fi; \
	done; \
	if [ -z "$${found:-}" ]; then \
	  echo "error: TwinGrad needs Python 3.11 or later, and $(PYTHON) is" \
	    "$$("$(PYTHON)" --version 2>/dev/null || echo 'not to be found'). Name another one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; \
	  exit 2; \
	fi; \
	echo "Creating $(VENV) with $$("$$found" --version)"; \
	"$$found" -m venv "$(VENV)"
	@touch "$@"

# The build backend first, so that it is pinned like everything else. Modules are compiled when they are first imported:
# most never are.
$(STAMPS)/.base: pyproject.toml constraints.txt | $(STAMPS)/.venv
	@echo "Installing both engines into $(VENV)"
	$(PIP) install --quiet --no-compile -c constraints.txt hatchling
	$(PIP) install --quiet --no-compile -c constraints.txt --no-build-isolation -e .
	@touch "$@"

$(STAMPS)/.run: $(STAMPS)/.base
	@echo "Installing what the experiments need into $(VENV)"
	$(PIP) install --quiet --no-compile -c constraints.txt --no-build-isolation -e '.[experiments,torch,tensorflow,jax,microbenchmarks,dask,memory]'
	@touch "$@"

$(STAMPS)/.dev: $(STAMPS)/.base
	@echo "Installing the experiments, the tests and the benchmarks into $(VENV)"
	$(PIP) install --quiet --no-compile -c constraints.txt --no-build-isolation -e '.[all]'
	@touch "$(VENV)/.run" "$@"
