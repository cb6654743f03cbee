# Everything runs in a virtual environment, .venv, that make builds and keeps up to date.
# `make PYTHON=/path/to/python3` chooses the Python it is made with.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --use-pep517 -c constraints.txt
CANDIDATES := python3.13 python3.12 python3.11 python3
SHELL := /bin/sh
.DEFAULT_GOAL := help
# Daemons are started hundreds of times: without bytecode each start takes a quarter longer.
unexport PYTHONDONTWRITEBYTECODE
# With `auto` more processes than cores (tests/conftest.py): tests wait for servers and daemons.
SIDE_BY_SIDE := -n auto --maxprocesses 4 --dist loadgroup --no-loadscope-reorder
FAST := not (slow or attack or thorough or long)
.PHONY: help demo unit test test-thorough test-long test-hostile attack matrix spark-matrix soak soak-leaks histories fuzz fuzz-native lint bench bench-quick profile audit sbom package docs docs-reference errors-page clean java

# Java 17 or later, found on the PATH or in JAVA_HOME; Spark needs it.
JAVA := $${JAVA_HOME:+$$JAVA_HOME/bin/}java
JAVA_MAJOR := $(JAVA) -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1
HAS_JAVA := [ "$$($(JAVA_MAJOR))" -ge 17 ] 2>/dev/null

help: ## Show this list
	@sed -n 's/^\([a-z-]*\): .*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | \
		awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'

demo: $(VENV)/.demo ## Watch Postgres changes arrive in Delta tables (about a minute; ARGS="--seconds 60")
	@if $(HAS_JAVA) && [ ! -e $(VENV)/.spark ]; then \
		echo "Installing PySpark ..."; $(PIP) -e '.[demo,spark]' && touch $(VENV)/.spark; fi
	@$(BIN)/ingestd demo $(ARGS)

unit: $(VENV)/.dev ## Run the fast unit tests in a minute: no server, no Java (ARGS="-k name" for some)
	@$(BIN)/python -m pytest -m '$(FAST)' --hypothesis-profile fast $(subst auto,logical,$(SIDE_BY_SIDE)) tests/unit $(ARGS)

test: $(VENV)/.dev java ## Run the tests, in under 20 minutes (ARGS="-k name" for some)
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

test-thorough: $(VENV)/.dev java ## Run the others: side paths, more seeds, points and sizes
	@$(BIN)/python -m pytest -m 'thorough and not long' $(SIDE_BY_SIDE) $(ARGS)

test-long: $(VENV)/.dev java ## Run the long tests (random workloads under kills, minutes each)
	@$(BIN)/python -m pytest -m long $(ARGS)

attack: $(VENV)/.dev java ## Attack it as each attacker of SECURITY.md, report what was held
	@$(BIN)/python -m pytest -m 'attack and not long' $(SIDE_BY_SIDE) $(ARGS)

test-hostile: $(VENV)/.dev ## Run the integration tests where others have shadowed all of pg_catalog (ARGS="-k name")
	@INGESTD_TEST_HOSTILE=1 $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not long" tests/integration $(ARGS)

matrix: $(VENV)/.dev ## Run the tests of servers on PostgreSQL 14 to 18 (ARGS="14 17" for some)
	@$(BIN)/python -m tests.matrix $(ARGS)

spark-matrix: $(VENV)/.dev java ## Run tests of the jobs on Spark 3.5 and 4.2 (ARGS="4.0 4.1" for others, ARGS=all)
	@$(BIN)/python -m tests.spark_matrix $(ARGS)

soak: $(VENV)/.dev ## Kill daemon, Postgres, connections at random (MINUTES=10 SEED=n), compare
	@$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED)) $(ARGS)

soak-leaks: $(VENV)/.dev ## A steady load for long (MINUTES=60): do memory, files, threads, tasks grow?
	@$(BIN)/python -m tests.soak.leaks --minutes $(or $(MINUTES),60) $(if $(SEED),--seed $(SEED)) $(ARGS)

histories: $(VENV)/.dev ## Random DML and DDL between kills and checks of the catalog (N=2000 SERVER=15 SEED=n DDL_LOG=catalog)
	@$(BIN)/python -m tests.histories --count $(or $(N),2000) --server $(or $(SERVER),15) $(if $(SEED),--seed $(SEED)) --ddl-log $(or $(DDL_LOG),catalog) $(ARGS)

fuzz: $(VENV)/.dev ## Fuzz the decoder, guided by coverage (SECONDS=60 for each target; needs atheris)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(PIP) -e '.[fuzz]'
	@$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),60) $(ARGS)

fuzz-native: $(VENV)/.dev ## Fuzz the compiled part alone under gcc's sanitizers (INPUTS=50000000)
	@$(BIN)/python -m tests.fuzz.native --inputs $(or $(INPUTS),50000000) $(ARGS)

lint: $(VENV)/.dev ## Check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(VENV)/.dev ## Measure (ten minutes; ARGS=NAME: one, `all`: all), write benchmarks/RESULTS.md
	@$(BIN)/python -m benchmarks $(ARGS)

bench-quick: $(VENV)/.dev ## Measure less, in under 90 s
	@$(BIN)/python -m benchmarks --quick $(ARGS)

profile: $(VENV)/.dev ## Rows per second and core of each stage, and a flame graph
	@$(BIN)/python -m benchmarks.daemon.stages $(ARGS)

audit: $(VENV)/.dev ## Look what ingestd needs to run up among known vulnerabilities
	@.ci/packages audit

sbom: $(VENV)/.dev ## Write the installed packages to sbom.json (CycloneDX)
	@.ci/packages sbom

docs: $(VENV)/.dev ## Build the documentation as a site into build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-reference: $(VENV)/.dev ## Write docs/reference/ from the code
	@$(BIN)/python -m docs_site

errors-page: $(VENV)/.dev ## Bring faults about and write docs/errors.md, what is said about them
	@touch docs/errors.md
	@INGESTD_WRITE_ERRORS_PAGE=1 $(BIN)/python -m pytest -q -m thorough tests/integration/test_errors_page.py

package: $(VENV)/.dev ## Build wheel and sdist, look into them, install the wheel as a user does
	@$(BIN)/python .ci/package.py

clean: ## Remove caches, build output and the demo's lake (.venv stays)
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf .venv-audit sbom.json demo-lake spark-warehouse metastore_db derby.log benchmarks/.data
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

java:
	@if $(HAS_JAVA); then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Java 17 is missing; installing it ..."; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
			apt-get install -y -qq openjdk-17-jre-headless </dev/null >/dev/null && exit 0; \
	fi; \
	echo "The Spark tests need Java 17 or later, and there is none. Install it:" >&2; \
	echo "  sudo apt-get install openjdk-17-jre-headless    (Debian, Ubuntu)" >&2; \
	echo "  sudo dnf install java-17-openjdk-headless       (Fedora, RHEL)" >&2; \
	echo "  brew install openjdk@17                         (macOS)" >&2; \
	exit 1

$(BIN)/python:
	@for candidate in $(if $(PYTHON),$(PYTHON),$(CANDIDATES)); do \
		$$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
		if ! $$candidate -c 'import ensurepip, venv' 2>/dev/null; then \
			incomplete=$$candidate; continue; fi; \
		echo "Making $(VENV) with $$($$candidate --version)"; \
		$$candidate -m venv $(VENV); exit; \
	done; \
	if [ -n "$$incomplete" ]; then \
		echo "$$incomplete has no venv module. Install it: sudo apt-get install python3-venv" >&2; \
	else \
		echo "ingestd needs Python 3.11 or later; none of these is: $(or $(PYTHON),$(CANDIDATES))" >&2; \
		echo "  sudo apt-get install python3 python3-venv       (Debian 12, Ubuntu 24.04 or later)" >&2; \
	fi; \
	exit 1

$(VENV)/.demo: pyproject.toml setup.py constraints.txt ingestd/decode/_native.c | $(BIN)/python
	@echo "Installing ingestd and the demo's Postgres into $(VENV) ..."
	@rm -f $(VENV)/.spark
	@$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml setup.py constraints.txt ingestd/decode/_native.c | $(BIN)/python
	@echo "Installing ingestd with its development tools into $(VENV) ..."
	@$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.demo $(VENV)/.spark
