# Two ways in: `make demo` shows agentd at work, `make test` passes its tests.
# Both make their own virtual environment in .venv; VENV is another one, PYTHON what makes it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PYTHON_BIN := $(abspath $(BIN)/python)
WORKERS ?= 3
# Where it is set each start of a daemon would compile agentd anew, a fifth of what the start takes.
unexport PYTHONDONTWRITEBYTECODE
SECONDS ?= 3600
PLUGINS := $(wildcard plugins/*)
ENGINES := $(wildcard engines/*)
PARTS := $(PLUGINS) fleet $(ENGINES)
SOURCES := pyproject.toml $(PARTS:%=%/pyproject.toml)

WHEELS := .wheels
FOR ?= 3.11
PLATFORMS ?= manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64
# Elsewhere these shorten the product's deadlines, or repeat less.
WAITING := $(addprefix tests/end_to_end/,test_engine_trouble.py test_events.py test_socket_activation.py test_statistics.py fleet/test_failures.py fleet/test_gateway.py fleet/test_lies.py)
# What `make check` leaves to `make test` and `make test-chaos`: programs as a whole, started from cold, and what waits long.
WHOLE := $(addprefix tests/,end_to_end crash hostile hardware fleet/field cli/agentctl/test_run.py cli/test_agentctl.py cli/test_check_config.py cli/test_commands.py pluginhost/test_recovery.py test_ceilings.py test_console.py test_packaging.py)
# Kills, damage, shortages and hostile callers, of which most are drawn by chance.
CHAOS := tests/crash tests/hostile $(addprefix tests/end_to_end/,test_holders_together.py fleet/test_exactly_one.py)
PROPERTIES := tests/core tests/fleet tests/services tests/runtimes/test_systemd.py
NAMES := $(PLUGINS:plugins/%=agentd-plugin-%)

.PHONY: demo demo-fleet test test-chaos test-docker test-fleet test-engines test-node test-hardware wheels deb check lint unit soak bench clean

demo: $(VENV)/.installed
	PATH="$(CURDIR)/$(BIN):$$PATH" bash docs/start/demo.sh

demo-fleet: $(VENV)/.installed
	PATH="$(CURDIR)/$(BIN):$$PATH" bash docs/start/demo-fleet.sh

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(CHAOS:%=--ignore=%) $(ARGS)
	@echo "not run: $(CHAOS); run it with: make test-chaos"

test-chaos: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(CHAOS) $(ARGS)

# Parts of `make test` and `make test-chaos`: what needs a Docker Engine; the fleet, which needs etcd.
test-docker: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m docker $(ARGS)

test-fleet: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup tests/fleet tests/end_to_end/fleet $(ARGS)

# Engines that take their devices from agentd, for real: Slurm (slurmctld, slurmd, slurm-client, munge; docker; root).
test-engines: $(VENV)/.installed-dev
	AGENTD_TEST_ENGINES=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup tests/engines --timeout 400 $(ARGS)

# On two virtual machines that are compute nodes: takes qemu-system-x86, qemu-utils, mmdebstrap and root.
test-node: $(VENV)/.installed-dev
	AGENTD_TEST_NODE=1 $(BIN)/python -m pytest -n 2 --dist loadgroup tests/node --timeout 1200 $(ARGS)

deb: $(VENV)/.installed
	packaging/build-deb build/deb

# On a machine with a GPU, and no network: `make wheels` made .wheels before, on one that has some.
test-hardware: $(if $(wildcard $(WHEELS)/*.whl),$(VENV)/.installed-wheels,$(VENV)/.installed)
	bash tests/hardware/run.sh

$(VENV)/.installed-wheels: $(wildcard $(WHEELS)/*.whl) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --no-index --find-links $(WHEELS) --force-reinstall agentd-node $(NAMES)
	touch $@

wheels: $(VENV)/bin/python
	rm -rf build plugins/*/build # setuptools keeps modules there that are gone
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir $(WHEELS) . $(PLUGINS:%=./%)
	$(BIN)/python -m pip download --quiet --only-binary=:all: --python-version $(FOR) --implementation cp $(PLATFORMS:%=--platform %) --find-links $(WHEELS) --dest $(WHEELS) agentd-node $(NAMES)

check: lint
	$(MAKE) --no-print-directory unit
	@echo "not run: what needs Docker, $(filter-out $(CHAOS),$(WHOLE)); run it with: make test"
	@echo "not run: $(filter $(CHAOS),$(WHOLE)); run it with: make test-chaos"

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/lint.py

unit: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "not docker" $(WHOLE:%=--ignore=%) $(ARGS)

soak: $(VENV)/.installed-dev
	AGENTD_SOAK=$(SECONDS) AGENTD_REQUIRE_ALL=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m soak $(ARGS)
	AGENTD_TEST_NODE=1 AGENTD_SOAK=$(SECONDS) $(BIN)/python -m pytest -s tests/node/test_node_contracts.py tests/node/test_node_crash.py tests/node/test_node_reboots.py --timeout 14400
	AGENTD_SEED=$${AGENTD_SEED:-$$(shuf -i 0-999999 -n 1)} AGENTD_TEST_ENGINES=1 AGENTD_SOAK=$(SECONDS) AGENTD_REQUIRE_ALL=1 $(BIN)/python -m pytest -s tests/engines/test_slurm_collisions.py
	AGENTD_SEED=$${AGENTD_SEED:-$$(shuf -i 0-999999 -n 1)} AGENTD_SOAK=$(SECONDS) AGENTD_REQUIRE_ALL=1 $(BIN)/python -m pytest -s $(CHAOS) tests/end_to_end/test_document.py tests/end_to_end/fleet/test_document.py tests/end_to_end/test_exec.py $(PROPERTIES) $(WAITING) $(ARGS)

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/goals.py

clean:
	rm -rf $(VENV) $(WHEELS) build .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(SOURCES) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable . $(PARTS:%=--editable %)
	touch $@

$(VENV)/.installed-dev: $(SOURCES) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' $(PARTS:%=--editable %)
	touch $@ $(VENV)/.installed
