# Thin by rule: every target calls a script, a tool or the flotilla command line.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3.11
PYTHON312 ?= python3.12
BIN := .venv/bin
TOOLS := .venv-tools
DOCS := .venv-docs
STACK ?=
DIST ?= dist
VERSION := $(shell cut -d + -f 1 VERSION)
# The contracts of the last release lie in the tree, because a clone may have no tags.
RELEASED := $(shell ls protos/released/*.binpb 2>/dev/null | sort -V | tail -n 1)
PACKAGES := $(patsubst %/pyproject.toml,%,$(wildcard libs/*/pyproject.toml services/*/pyproject.toml))
# What imports vLLM or torch has suites of its own below.
LIGHT_SERVICES := $(filter-out services/generator services/trainer,$(filter services/%,$(PACKAGES)))
LIGHT := $(addprefix libs/,core algorithms data trackers launch client workers cli) $(LIGHT_SERVICES)
# A suite is a folder of tests/; its target test-<suite> exists when the folder holds tests.
SUITES := $(sort $(patsubst tests/%/,%,$(dir $(wildcard tests/*/test_*.py))))

.PHONY: help
help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf "  %-16s %s\n" $(foreach suite,$(SUITES),test-$(suite) "Run the tests in tests/$(suite)")

.PHONY: setup
setup:  ## Build .venv from the lock and install all packages (a no-op when current)
	@PYTHON=$(PYTHON) scripts/setup.sh .venv

.PHONY: up down ps logs doctor
ifneq ($(STACK),)
up down ps logs doctor: export FLOTILLA_STACK := $(STACK)
endif

up: setup  ## Start a local fleet (STACK=my.yaml: another one; so for down, ps, logs, doctor)
	@$(BIN)/flotilla up

down: setup  ## Stop the local fleet
	@$(BIN)/flotilla down

ps: setup  ## List the services of the fleet
	@$(BIN)/flotilla ps

logs: setup  ## Show the logs of the fleet
	@$(BIN)/flotilla logs

doctor: setup  ## Check this machine and the fleet
	@$(BIN)/flotilla doctor

.PHONY: demo
demo: setup  ## Train a small model on arithmetic, end to end
	@$(BIN)/python examples/arithmetic/demo.py

.PHONY: demo-real
demo-real: setup  ## Teach a real chat model to follow instructions (it is downloaded once, 92 MB)
	@$(BIN)/python examples/instruct/demo.py

.PHONY: bench
bench: setup  ## Measure and print one table
	@$(BIN)/python bench/run.py

.PHONY: test test-unit with-engines with-ranks unit-services unit-libs unit-launch unit-cli
# Suites share the cores: threads of one that wait for each other would wait for a core of another.
test: export OMP_NUM_THREADS ?= 1
# Who computes keeps a core for longer then, and finds more in its caches.
LONG_SLICES := $(shell chrt --batch 0 true 2>/dev/null && echo chrt --batch 0)
test: setup  ## Run the unit, contract and integration tests
	@echo "==> integration, unit and contract tests, three suites at a time, each told when it ends"
	@# Each waits for processes now and then; the longest begin, so that all end together.
	@$(LONG_SLICES) $(MAKE) --no-print-directory --keep-going --jobs=3 --output-sync=target \
	with-engines with-ranks test-contract unit-services unit-libs unit-launch unit-cli

# Who imports vLLM, or what a rank imports, does so once for unit and integration tests.
with-engines: setup
	@echo "==> unit tests of the generator and integration tests of fleets"
	@$(BIN)/pytest -q services/generator tests/integration --ignore=tests/integration/trainer

with-ranks: setup
	@echo "==> unit and integration tests of the trainer"
	@$(BIN)/pytest -q services/trainer tests/integration/trainer

test-unit: setup  ## Run the unit tests of libs and services
	@$(BIN)/pytest -q libs services

unit-services: setup
	@echo "==> unit tests of services without vLLM and torch"
	@$(BIN)/pytest -q $(LIGHT_SERVICES)

unit-libs: setup
	@echo "==> unit tests of the libs"
	@$(BIN)/pytest -q libs --ignore=libs/launch --ignore=libs/cli

unit-cli: setup
	@echo "==> unit tests of the command line"
	@$(BIN)/pytest -q libs/cli

unit-launch: setup
	@echo "==> unit tests of the launcher"
	@$(BIN)/pytest -q libs/launch

.PHONY: test-chaos chaos-matrix chaos-beside chaos-real-engine
test-chaos: setup
	@echo "==> the fault matrix and all other faults, two suites at a time, each told when it ends"
	@$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target chaos-matrix chaos-beside chaos-real-engine

chaos-matrix:
	@$(BIN)/pytest -q -s tests/chaos/test_fault_matrix.py -k "not real_engine"

chaos-beside:
	@$(BIN)/pytest -q -s tests/chaos --ignore=tests/chaos/test_fault_matrix.py

chaos-real-engine:
	@$(BIN)/pytest -q -s tests/chaos/test_fault_matrix.py -k real_engine

.PHONY: test-all
test-all: setup  ## Run every suite that this machine can, one after the other; build/what-ran.md is the table
	@$(BIN)/python scripts/test_all.py test docs \
	$(filter-out test-contract test-integration,$(SUITES:%=test-%)) test-py312

.PHONY: $(SUITES:%=test-%)
$(filter-out test-chaos test-docker test-environments test-helm test-load test-ray test-storage test-tasks test-trackers,$(SUITES:%=test-%)): test-%: setup
	@echo "==> $* tests"
	@$(BIN)/pytest -q tests/$*

test-load: setup
	@echo "==> load tests, the tokens of a hundred thousand turns, and those of thirty thousand turns of agents"
	@$(BIN)/pytest -q tests/load
	@FLOTILLA_TURNS=17000 $(BIN)/pytest -q services/coordinator/tests/rollouts/test_transcript.py -k render_of_the_history
	@FLOTILLA_AGENT_TURNS=10000 $(BIN)/pytest -q tests/integration/test_agent_turns.py

test-docker:
	@PYTHON=$(PYTHON) scripts/setup.sh .venv-docker requirements/docker.txt
	@echo "==> docker: images, and fleets of containers on a real engine"
	@.venv-docker/bin/pytest -q tests/docker

# Servers and environments of others, each with packages that exclude ours.
OF_OTHERS := mcp-server openenv verifiers
test-environments: setup $(OF_OTHERS:%=.venv-%/.ready)
	@echo "==> environments: servers and environments of public packages are played unchanged"
	@$(BIN)/pytest -q tests/environments

.venv-%/.ready: requirements/%.txt
	@echo "==> environments: building .venv-$*"
	@$(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

test-helm:
	@PYTHON=$(PYTHON) scripts/setup.sh .venv-helm requirements/helm.txt
	@echo "==> helm: the chart by Helm's own engine, against the schemas of three versions of Kubernetes"
	@.venv-helm/bin/pytest -q tests/helm

test-ray:
	@PYTHON=$(PYTHON) scripts/setup.sh .venv-ray requirements/ray.txt
	@echo "==> ray: stacks on a real Ray cluster of several nodes on this host"
	@.venv-ray/bin/pytest -q tests/ray

test-storage: setup
	@PYTHON=$(PYTHON) scripts/setup.sh .venv-storage requirements/storage.txt
	@echo "==> storage: models and checkpoints in a real S3 server, and a run that goes on elsewhere"
	@.venv-storage/bin/pytest -q tests/storage/test_real_s3.py
	@$(BIN)/pytest -q tests/storage/test_resumed_elsewhere.py

test-tasks:
	@PYTHON=$(PYTHON) scripts/setup.sh .venv-tasks requirements/tasks.txt
	@echo "==> tasks: every task of reasoning_gym is made, kept and scored, games are played"
	@.venv-tasks/bin/pytest -q tests/tasks

test-trackers:
	@PYTHON=$(PYTHON) scripts/setup.sh .venv-trackers requirements/trackers.txt
	@echo "==> trackers: real clients write, real readers read"
	@.venv-trackers/bin/pytest -q tests/trackers

.PHONY: test-py312
test-py312:  ## Run the unit tests of what needs no torch on Python 3.12, in .venv-py312
	@PYTHON=$(PYTHON312) scripts/setup.sh .venv-py312 requirements/light.txt
	@.venv-py312/bin/pytest -q $(LIGHT)

.PHONY: lint format
lint: setup proto-lint proto-check proto-breaking  ## Check style, types, imports and contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: setup  ## Rewrite the code in house style
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

.PHONY: reference
reference: setup  ## Generate docs/reference from the code
	@$(BIN)/python scripts/generate_reference.py

.PHONY: docs
docs: $(DOCS)/.ready  ## Build the pages as a site in build/docs; a warning is an error
	@$(DOCS)/bin/sphinx-build --quiet --fail-on-warning --keep-going -b html -c docs . build/docs
	@echo "==> docs: build/docs/docs/index.html"

.PHONY: proto proto-check proto-lint proto-breaking proto-release
proto: $(TOOLS)/.ready  ## Generate libs/proto from protos/
	@$(TOOLS)/bin/python scripts/generate_protos.py

proto-check: $(TOOLS)/.ready  ## Fail when libs/proto is stale
	@$(TOOLS)/bin/python scripts/generate_protos.py --check

proto-lint: setup  ## Check the style of protos/
	$(BIN)/buf lint protos

proto-breaking: setup  ## Fail when protos/ would break a client or service of the last release
	$(BIN)/buf breaking protos --against $(RELEASED)

proto-release: setup  ## Keep the contracts of this VERSION in protos/released; a release is never rewritten
	@if [ -e protos/released/$(VERSION).binpb ]; then \
	echo "protos/released/$(VERSION).binpb exists: raise VERSION first"; exit 1; fi
	$(BIN)/buf build protos --exclude-source-info --output protos/released/$(VERSION).binpb

$(TOOLS)/.ready: requirements/tools.txt
	@echo "==> code generator: building $(TOOLS)"
	@$(PYTHON) -m venv $(TOOLS)
	@$(TOOLS)/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements/tools.txt
	@touch $@

$(DOCS)/.ready: requirements/docs.txt
	@echo "==> site generator: building $(DOCS)"
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements/docs.txt
	@touch $@

.PHONY: wheels
wheels: setup  ## Build a wheel of every package, with the locks that an installation needs, into dist/
	@mkdir -p $(DIST) && rm -f $(DIST)/flotilla*.whl
	@$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir $(DIST) \
	$(addprefix ./,$(PACKAGES))
	@cp requirements/{constraints,generator,generator-gpu}.txt $(DIST)
	@cat requirements/dev-gpu.txt <(grep ^flotilla requirements/constraints.txt) > $(DIST)/constraints-gpu.txt
	@echo "$$(ls $(DIST)/*.whl | wc -l) wheels of version $(VERSION) are in $(DIST)"

.PHONY: images
images: setup  ## Build an image of every service with Docker (FLAVOUR=gpu, BASE=image:tag)
	@$(BIN)/python scripts/build_images.py --flavour $(or $(FLAVOUR),cpu) $(if $(BASE),--base $(BASE))

.PHONY: lock
lock: setup  ## Resolve requirements/*.in into locks (UPGRADE=1 takes newer releases)
	@$(BIN)/python scripts/lock.py $(if $(UPGRADE),--upgrade)

.PHONY: clean
clean:  ## Remove caches and build products (environments and runs stay)
	@find . -path './.venv*' -prune -o \( -name __pycache__ -o -name '*.egg-info' \) -type d -prune -exec rm -rf {} +
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
