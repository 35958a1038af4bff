# `make serve` and `make test` each make the environment they need.

PYTHON ?= python3
VENV   := .venv
PORT   ?= 8000
LOCK   := requirements/cpu.lock
BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest --durations=15
STAGE  := sh tests/stage.sh
# Tests of whole applications, in the order in which one starts while the tests of another wait: they have the machine to
# themselves. Two that are mostly waited for share it: one with DEPLOYED, one with MANIFEST. All others run in two
# processes; unit tests, which wait more than they compute, in four.
APPS     := $(addprefix tests/integration/,one_model test_prefill_decode.py several_models test_cores.py test_bins.py test_papers.py test_traces.py)
DEPLOYED := $(addprefix tests/integration/,test_serve_deploy.py test_redeploy.py test_two_nodes.py test_refused_start.py)
MANIFEST := tests/k8s/test_semantic.py
DEATHS   := tests/integration/test_deaths.py
OTHERS   := tests/ --dist worksteal $(addprefix --ignore=,$(APPS) $(DEPLOYED) $(MANIFEST) $(DEATHS))

.PHONY: help serve test test-deployed test-manifest test-unit soak check venv lock bench clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

serve: venv ## serve the demo model on http://127.0.0.1:$(PORT) (MODEL=... for another)
	@exec $(BIN)/sluice serve --port $(PORT) $(if $(MODEL),--model $(MODEL))

test: venv check ## check and test everything; each stage says how long it took here the last time
	@$(STAGE) parts "units, contracts, single engines, the chart" $(PYTEST) $(OTHERS) -n 2
	@$(STAGE) applications "whole applications on the demo model" $(PYTEST) $(APPS)
	@$(STAGE) deaths "processes are killed under load" $(PYTEST) $(DEATHS)
	@$(MAKE) --no-print-directory --jobs 2 test-deployed test-manifest

test-deployed: venv
	@$(STAGE) deployed "serve deploy on Ray clusters" $(PYTEST) $(DEPLOYED)

test-manifest: venv
	@$(STAGE) manifest "the rendered chart on a real Ray" $(PYTEST) $(MANIFEST)

test-unit: venv ## the fast tests, contracts among them: no Ray, no engine, no chart
	@$(STAGE) unit "the fast tests" $(PYTEST) $(OTHERS) -n 4 --ignore=tests/integration --ignore=tests/k8s --hypothesis-profile=quick -m "not slow"

soak: venv ## what takes minutes: a full disk, long deaths, memory under load; as root, some twenty minutes
	$(PYTEST) tests/integration/test_soak.py -m soak -s

check: venv ## format, lint, types
	@echo "== check: format, lint, types"
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: venv ## compare with plain vLLM, some twenty-five minutes
	$(BIN)/python -m bench.compare

venv: $(VENV)/.installed ## make the environment

$(VENV)/.installed: $(LOCK) pyproject.toml requirements/install.sh
	@PYTHON="$(PYTHON)" bash requirements/install.sh $(VENV) $(LOCK)
	@touch $@

lock: venv ## resolve the lock anew after a change of pyproject.toml
	@sh requirements/lock.sh $(BIN)/uv $(LOCK)

clean: ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
