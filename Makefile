# Everything a newcomer needs: `make demo` and `make test`. Both set up .venv on their own.
PYTHON ?= python3
VENV ?= .venv
# Made anew when what is asked for changes, or when another checkout uses the same environment.
STAMP := $(VENV)/.installed-$(shell (cat pyproject.toml constraints.txt; pwd) | sha256sum | cut -c1-16)

.PHONY: install demo test

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

test: install
	$(VENV)/bin/pytest
