# `make serve` and `make test` each make the environment they need.

# Python 3.11 to 3.13: requirements/python.sh takes the first that is there unless you name one.
VENV   := .venv
PORT   ?= 8000
BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest --durations=15
STAGE  := sh tests/stage.sh
UNITS  := tests --ignore=tests/integration -n 2 --dist worksteal

.PHONY: help serve test test-all test-fresh test-hosts test-system test-unit soak check venv lock bench clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

serve: venv ## serve the demo model on http://127.0.0.1:$(PORT) (MODEL=... for another)
	@exec $(BIN)/sluice serve --port $(PORT) $(if $(MODEL),--model $(MODEL))

test: test-system venv ## check, units, and one whole application; each stage says how long it took here the last time
	@$(STAGE) check "format, lint, types" $(MAKE) --no-print-directory check
	@$(STAGE) units "units, contracts, the chart's templates" $(PYTEST) $(UNITS) -m "not long and not soak"
	@$(STAGE) application "one application: API, page, batches, traces, deaths" $(PYTEST) tests/integration -m "not long and not soak"

test-all: test ## everything: the long suites of tests/suites.py after `make test`
	@$(BIN)/python -m tests.suites

test-fresh: venv ## make serve and make test on a new Debian 12 and 13; as root, twenty minutes
	@sh requirements/system.sh test-fresh
	@$(BIN)/python -m tests.suites fresh

test-hosts: venv ## a cluster of several hosts that lose power, cables and the head; as root, three quarters of an hour
	@$(BIN)/python -m tests.suites hosts

test-system:
	@sh requirements/system.sh test

test-unit: venv ## the fast tests, contracts among them: no Ray, no engine, no chart
	@$(STAGE) fast "the fast tests" $(PYTEST) $(UNITS) --ignore=tests/k8s -m "not slow and not long and not soak"

soak: venv ## what takes minutes: a full disk, long deaths, memory under load; as root, some twenty minutes
	$(PYTEST) tests/integration/test_soak.py -m soak -s

check: venv ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: venv ## compare with plain vLLM, some twenty-five minutes
	$(BIN)/python -m bench.compare

venv: $(VENV)/.installed ## make the environment

$(VENV)/.installed: $(wildcard requirements/*.lock) pyproject.toml requirements/install.sh
	@bash requirements/install.sh $(VENV)
	@touch $@

lock: venv ## resolve the locks anew after a change of pyproject.toml
	@sh requirements/lock.sh $(BIN)/uv

clean: ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
