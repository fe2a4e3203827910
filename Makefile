# Everything a newcomer needs: `make demo` and `make test`. Both set up .venv on their own.
PYTHON ?= python3
VENV ?= .venv
# Made anew when what is asked for changes, or when another checkout uses the same environment.
STAMP := $(VENV)/.installed-$(shell (cat pyproject.toml constraints.txt; pwd) | sha256sum | cut -c1-16)

.PHONY: install demo demo-vllm demo-sglang test test-chaos test-engines test-verifiers test-wandb test-trl test-verl test-ray test-mooncake
# Environments of other frameworks, each under the hash of what it is made from.
CACHE := $(or $(XDG_CACHE_HOME),$(CURDIR)/.cache)/penstock
made_from = $(shell (cat tests/integrations/requirements-$(1).txt constraints.txt; $(PYTHON) -VV) | sha256sum | cut -c1-16)

install: $(STAMP)

$(STAMP):
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV): PyTorch, then the rest; some minutes the first time"
	$(VENV)/bin/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(VENV)/bin/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	rm -f $(VENV)/.installed-*
	touch $@

demo: install
	$(VENV)/bin/penstock train configs/quickstart.toml

# Tests wait for processes and sockets about as long as they compute. Three at a time end sooner on two cores, and leave
# those that start whole runs less room.
TEST_PROCESSES ?= 2

test: install
	$(VENV)/bin/pytest -n $(TEST_PROCESSES) --dist worksteal

# Two hundred seeded faults of every kind over one run (`make test` has fifty), and the longest of the whole runs.
test-chaos: install
	$(VENV)/bin/pytest -n $(TEST_PROCESSES) --dist worksteal -m ci

# The integrations against the frameworks themselves, on CPU: minutes the first time, then about half a minute each.
test-trl test-verl test-ray test-verifiers test-wandb: test-%:
	$(MAKE) --no-print-directory $(CACHE)/$*-$(call made_from,$*)/.installed
	PYTHONPATH=src $(CACHE)/$*-$(call made_from,$*)/bin/pytest -p no:cacheprovider --noconftest \
	  $(wildcard tests/integrations/real_$**.py tests/ray/real_$*_*.py)

$(CACHE)/%/.installed:
	$(PYTHON) -m venv --clear $(@D)
	@echo "setting up $(@D): PyTorch, then the rest; some minutes the first time"
	$(@D)/bin/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(@D)/bin/pip install -q --disable-pip-version-check -c constraints.txt \
	  -r tests/integrations/requirements-$(firstword $(subst -, ,$*)).txt
	touch $@

# Weights by Mooncake's transfer engine, over TCP where there is no RDMA. Needs its system libraries (the requirements say).
test-mooncake:
	$(MAKE) --no-print-directory $(CACHE)/mooncake-$(call made_from,mooncake)/.installed-alone
	PYTHONPATH=src $(CACHE)/mooncake-$(call made_from,mooncake)/bin/pytest -p no:cacheprovider --noconftest \
	  tests/weights/real_mooncake.py

$(CACHE)/mooncake-%/.installed-alone:
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install -q --disable-pip-version-check -r tests/integrations/requirements-mooncake.txt
	touch $@

# Real engine servers, each in an environment of its own, on CPU.
ENGINES ?= .cache/engines

demo-vllm: install
	PYTHON=$(PYTHON) tests/engines/install-vllm.sh $(ENGINES)/vllm
	PATH="$(abspath $(ENGINES))/vllm/bin:$$PATH" $(VENV)/bin/penstock train configs/quickstart_vllm.toml

demo-sglang: install
	PYTHON=$(PYTHON) tests/engines/install-sglang.sh $(ENGINES)/sglang
	PATH="$(abspath $(ENGINES))/sglang/bin:$$PATH" $(VENV)/bin/penstock train configs/quickstart_sglang.toml

test-engines: install
	PYTHON=$(PYTHON) tests/engines/install-vllm.sh $(ENGINES)/vllm
	PYTHON=$(PYTHON) tests/engines/install-sglang.sh $(ENGINES)/sglang
	PENSTOCK_ENGINES=$(ENGINES) $(VENV)/bin/pytest tests/engines
