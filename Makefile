# Two commands do everything on a fresh Debian machine with Python: `make run` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
TEST_STAMP := .venv/.tested
PYTEST := $(BIN)/python -m pytest
QUICK := not slow and not real

.PHONY: install run test test-all test-real check bench golden docs gpu-check clean help

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | awk -F'\t' '{printf "  make %-10s %s\n", $$1, $$2}'

install: $(STAMP)  ## kvbench in .venv

$(STAMP): pyproject.toml
	@sh .ci/venv.sh $(PYTHON)
	@$(BIN)/pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(TEST_STAMP): $(STAMP) pyproject.toml
	@sh .ci/packages.sh gcc:gcc git:git
	@sh .ci/unpack.sh .venv/tools usr/bin/influxd:influxdb usr/bin/victoria-metrics:victoria-metrics
	@sh .ci/nvml.sh .venv/tools/nvml || echo "the test against NVIDIA's real library without a driver will be skipped"
	@sh .ci/nsys.sh .venv/tools/nsys || echo "tests against the real Nsight Systems will be skipped"
	@$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@

run: $(STAMP)  ## run scenarios/wave.yaml on the embedded engine and say where the report is
	@$(BIN)/kvbench run scenarios/wave.yaml

test:  ## everything that a change must pass (installs what it needs)
	@begin=$$(date +%s); $(MAKE) --no-print-directory $(TEST_STAMP) && echo "set-up: $$(( $$(date +%s) - begin )) s"
	@begin=$$(date +%s); $(MAKE) --no-print-directory check && \
	$(PYTEST) -m "$(QUICK) and not alone" -n 2 --dist worksteal -q && $(PYTEST) -m "$(QUICK) and alone" -q; \
	code=$$?; echo "suite: $$(( $$(date +%s) - begin )) s"; exit $$code

test-all: $(TEST_STAMP)  ## the slow tests too
	$(PYTEST) -m "not real and not alone" -n 2 --dist worksteal -q
	$(PYTEST) -m "alone and not real" -q

test-real: $(TEST_STAMP)  ## against a real vLLM, and with vLLM's and GuideLLM's clients (all into .venv-real: about 10 minutes)
	PYTHON=$(PYTHON) sh .ci/real_server.sh run $(PYTEST) -m real -q

check: $(TEST_STAMP)  ## formatting, lint, types
	@$(BIN)/ruff check --quiet kvbench tests && $(BIN)/ruff format --quiet --check kvbench tests
	@$(BIN)/mypy --no-error-summary

bench: $(TEST_STAMP)  ## how fast kvbench itself is, as ratios against a bare client, wrk and libcachesim
	@sh .ci/packages.sh wrk:wrk gcc:gcc
	$(BIN)/python tests/bench/hot_path.py
	$(BIN)/python tests/bench/curve.py
	$(BIN)/python -m tests.bench.sink

golden: $(TEST_STAMP)  ## rewrite the golden files and show what changed
	$(PYTEST) tests/golden -q --golden-rewrite
	git --no-pager diff --stat -- tests/golden

docs: $(STAMP)  ## regenerate what the docs take from the code
	$(BIN)/kvbench schema --markdown > docs/scenario.md

gpu-check: $(STAMP)  ## the checks that need an NVIDIA GPU: a table and results/gpu-check.json in under 5 minutes
	$(BIN)/python tests/bench/gpu_check.py

clean:  ## remove what was built (results stay)
	rm -rf .venv .venv-real build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find kvbench tests -name __pycache__ -type d -exec rm -rf {} +
