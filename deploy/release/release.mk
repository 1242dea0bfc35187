# The commands of a release and of CI's machines: `make -C deploy/release help` lists them. They run
# in the checkout's root, with the variables and environments of its Makefile.
HERE := make -C deploy/release
include Makefile

.PHONY: setup-release pins wheels dist sbom notes formula release-page \
	image-index lint-images first-minute parity device-short nightly nightly-reference

setup-release: $(VENV)/.setup-release

$(VENV)/.setup-release: requirements/release.txt $(VENV)/.setup-dev
	@echo "Installing what builds a release."
	@$(PIP) --require-hashes --no-deps -r requirements/release.txt
	@touch $@

# Names, versions, hashes and platform markers; no address of any index.
LOCK = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-header --no-annotate --no-emit-index-url --no-emit-find-links
COMPILE = $(LOCK) pyproject.toml
pins: setup-release ## Choose the newest versions and write requirements/
	$(COMPILE) --upgrade -o requirements/runtime.txt
	$(COMPILE) --extra bench -c requirements/runtime.txt -o requirements/bench.txt
	$(COMPILE) --extra otel -c requirements/bench.txt -o requirements/otel.txt
	$(COMPILE) --extra bench --extra otel --group test --group lint -c requirements/otel.txt \
		-o requirements/dev.txt
	$(COMPILE) --extra bench --extra otel --group test --group compat -c requirements/dev.txt \
		-o requirements/compat.txt
	$(COMPILE) --extra ray -c requirements/runtime.txt -o requirements/ray.txt
	$(LOCK) --group reference -c requirements/runtime.txt -o requirements/reference.txt
	$(LOCK) --group clients -o requirements/clients.txt
	$(LOCK) --group site -o requirements/site.txt
	$(LOCK) --group aider -o requirements/aider.txt
	$(LOCK) --group release -c requirements/dev.txt -o requirements/release.txt
	$(COMPILE) --extra cuda --no-emit-package mlx-cpu -c requirements/runtime.txt \
		-o requirements/cuda.txt
	$(COMPILE) --extra cuda13 --no-emit-package mlx-cpu -c requirements/runtime.txt \
		-o requirements/cuda13.txt

wheels: setup-release ## Look for a wheel of every pin, on each platform and Python (minutes; asks an index)
	$(BIN)/python -m deploy.release.wheels

# MLX_GATEWAY_REPOSITORY=owner/name, or GITHUB_REPOSITORY, is where the links of a release lead.
dist: setup-release ## Build wheel and sdist into dist/, and serve from each (minutes)
	rm -f dist/mlx_gateway-*
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/mlx_gateway-*
	NEWER=$(NEWER) $(BIN)/python -m pytest tests/test_dist.py -m dist

sbom: setup-release ## Write dist/mlx-gateway.cdx.json: what the pins install, as CycloneDX has it
	@$(BIN)/python -m deploy.release.sbom

notes: setup-dev ## Write dist/notes.md, what CHANGELOG.md says of the version (ARGS=Unreleased)
	@mkdir -p dist
	@$(BIN)/python -m deploy.release.notes $(ARGS) > dist/notes.md
	@cat dist/notes.md

formula: setup-dev ## Write dist/mlx-gateway.rb, a Homebrew formula of the sdist in dist/
	@$(BIN)/python -m deploy.release.formula

release-page: ## Make GITHUB_REF_NAME's release of what is in dist/, by GitHub's gh
	gh release create $(GITHUB_REF_NAME) --repo $(GITHUB_REPOSITORY) --verify-tag \
		--title $(GITHUB_REF_NAME) --notes-file dist/notes.md \
		dist/mlx_gateway-* dist/mlx-gateway.rb dist/mlx-gateway.cdx.json

# One name for the images of each architecture, which CI built on machines of theirs.
image-index: ## Join IMAGE-amd64 and IMAGE-arm64, as a registry has them, under IMAGE
	docker buildx imagetools create --tag $(IMAGE) $(IMAGE)-amd64 $(IMAGE)-arm64

lint-images: setup-release ## Check deploy/container with hadolint
	$(BIN)/hadolint --failure-threshold warning deploy/container/Dockerfile

first-minute: setup-dev ## Serve models.yaml as a newcomer does, and ask what README asks
	$(BIN)/python -m pytest compat_tests/test_readme.py compat_tests/test_shipped.py -m slow

# The state of the first is the second's: no part runs twice. No page of docs is written.
SHORT = $(BIN)/python -m benchmarks.device --small --pages .device
parity: setup ## Compare this device's answers, with small shapes (minutes)
	$(SHORT) $(foreach part,1 2 3 4 5 6 7 8 9 10 11 12 13 14,--part $(part))

device-short: setup ## Do that and measure, with small shapes, into .device/ (a quarter of an hour)
	$(SHORT)

# Not the pins, but what came out since: in an environment of its own.
nightly: ## Run the tests with the newest mlx and mlx-lm
	@$(MAKE) --no-print-directory VENV=$(VENV)-nightly setup-dev
	@$(VENV)-nightly/bin/python -m pip install $(QUIET) --disable-pip-version-check --upgrade \
		mlx "mlx[cpu]; sys_platform == 'linux'" mlx-lm
	@$(VENV)-nightly/bin/python -m pip list | grep -i "^mlx"
	@$(MAKE) --no-print-directory VENV=$(VENV)-nightly test

# The newest mlx-lm and transformers, beside the torch that is pinned.
nightly-reference: ## Compare the newest mlx-lm with the newest transformers, key by key
	@$(MAKE) --no-print-directory VENV=$(VENV)-nightly setup-reference
	@$(VENV)-nightly-reference/bin/python -m pip install $(QUIET) --disable-pip-version-check --upgrade \
		mlx "mlx[cpu]; sys_platform == 'linux'" mlx-lm transformers
	$(VENV)-nightly-reference/bin/python -m benchmarks.reference $(or $(ARGS),--jobs 2)
