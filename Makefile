# One command to start, one to check; `make` alone lists them.
#
# demo, test and bench use the WHEEL as a user gets it: built into dist/, installed without links back to
# this tree, and run from an empty folder, so that the tree's own convt_reduce can never be imported
# instead. The stamps of finished set-up steps lie inside the environment: they vanish with it.

PYTHON ?= python3
VENV ?= .venv
# What to install where the environment has no torch yet, for instance 'torch<2.15'.
TORCH ?= torch>=2.10
PYTEST_ARGS ?=
BENCH_ARGS ?=

ENV := $(if $(filter /%,$(VENV)),$(VENV),$(CURDIR)/$(VENV))
PY := "$(ENV)/bin/python"
PIP := $(PY) -m pip --disable-pip-version-check --quiet
STAMPS := $(VENV)/.convt_reduce
ELSEWHERE := build/elsewhere
# The build runs ninja by name.
export PATH := $(ENV)/bin:$(PATH)

SOURCES := setup.py tools/architectures.py pyproject.toml MANIFEST.in $(wildcard README.md LICENSE) \
  $(shell find csrc convt_reduce -type f ! -name '*.pyc' ! -name '*.so' ! -name _build_info.json)
# Everything else that decides what is in the wheel. Kept in a file that changes only when they do.
SETTINGS := $(VENV) | $(SOURCES) | $(shell command -v nvcc) | $(CUDA_HOME) $(CUDA_PATH) | \
  $(filter-out default,$(origin CXX)) $(CXX) | $(CONVT_REDUCE_BUILD_CUDA) | \
  $(CONVT_REDUCE_LOCAL_VERSION) | $(TORCH_CUDA_ARCH_LIST)

.DELETE_ON_ERROR:
# Two pips at once would break an environment; the compiler runs in parallel anyway.
.NOTPARALLEL:
.PHONY: help demo test coverage bench report check tidy dev wheel sdist release-check installed clean FORCE

help:
	@echo "make demo    build the wheel, install it in $(VENV), compare with plain PyTorch"
	@echo "make test    build the wheel, install it in $(VENV), run the tests against it; PYTEST_ARGS='-k name'"
	@echo "make coverage  the tests' coverage: lines and branches of the Python, lines of the C++"
	@echo "make bench   build the wheel, install it in $(VENV), time it against its peers; BENCH_ARGS='--filter host'"
	@echo "make report  docs/performance.md and its plots, from build/bench.json, which make bench leaves"
	@echo "make check   ruff and clang-format: style of the Python and C++ sources"
	@echo "make tidy    clang-tidy over the C++ of the checks and the CPU half"
	@echo "make dev     everything that the other commands need, ready in $(VENV)"
	@echo "make wheel   the wheel, into dist/"
	@echo "make sdist   the source archive, into dist/"
	@echo "make release-check  what a release must pass, beyond the tests: about an hour, some GB"
	@echo "make clean   remove what was built; $(VENV) stays"
	@echo
	@echo "PYTHON=python3.12 picks the Python of a new environment, VENV=/path/to/env uses another one."
	@echo "CONVT_REDUCE_BUILD_CUDA=1|0|auto and TORCH_CUDA_ARCH_LIST decide about the CUDA half."

demo: installed
	@echo "==> demo"
	@cd $(ELSEWHERE) && $(PY) -m convt_reduce demo

test: installed $(STAMPS)/test
	@echo "==> tests, against the installed wheel"
	@cd $(ELSEWHERE) && $(PY) -m pytest -c "$(CURDIR)/pyproject.toml" "$(CURDIR)/tests" $(PYTEST_ARGS)

# Of a copy whose C++ counts its lines.
coverage: installed $(STAMPS)/test $(STAMPS)/coverage
	@echo "==> coverage"
	@cd $(ELSEWHERE) && $(PY) "$(CURDIR)/tools/coverage.py"

# The peers that are compiled here want ninja, which the build's environment has.
bench: installed
	@echo "==> benchmark, of the installed wheel"
	@cd $(ELSEWHERE) && $(PY) "$(CURDIR)/benchmarks/full.py" --json "$(CURDIR)/build/bench.json" $(BENCH_ARGS)

report: installed $(STAMPS)/bench
	@echo "==> docs/performance.md from build/bench.json"
	@cd $(ELSEWHERE) && $(PY) "$(CURDIR)/benchmarks/report.py" "$(CURDIR)/build/bench.json"

check: $(STAMPS)/lint
	@echo "==> ruff check"
	@$(PY) -m ruff check .
	@echo "==> ruff format --check"
	@$(PY) -m ruff format --check .
	@echo "==> clang-format"
	@find csrc benchmarks -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu' | \
	  xargs "$(ENV)/bin/clang-format" --dry-run --Werror

# Apart from check, which needs no torch.
tidy: $(STAMPS)/build $(STAMPS)/lint
	@echo "==> clang-tidy"
	@PYTHON=$(PY) tools/tidy.sh

dev: installed $(STAMPS)/dev
	@echo "==> ready: $(ENV)"

wheel: dist/.wheel

sdist: $(STAMPS)/build
	@echo "==> building the source archive into dist/"
	@rm -f dist/*.tar.gz
	@mkdir -p build
	@$(PY) -m build --sdist --no-isolation --outdir dist . > build/sdist.log 2>&1 || \
	  { cat build/sdist.log; exit 1; }
	@ls dist/*.tar.gz

release-check: $(STAMPS)/build sdist
	@VENV="$(ENV)" tools/ci/release_check.sh

# Compared by content: another checkout may have put its own wheel into a shared environment.
installed: dist/.wheel
	@rm -rf $(ELSEWHERE) && mkdir -p $(ELSEWHERE)
	@wheel=$$(ls "$(CURDIR)"/dist/*.whl); \
	if ! (cd $(ELSEWHERE) && $(PY) "$(CURDIR)/tools/is_installed.py" "$$wheel"); then \
	  echo "==> installing $$(basename "$$wheel") into $(VENV)"; \
	  $(PIP) install --force-reinstall --no-deps "$$wheel"; \
	fi
	@$(PY) tools/check_wheel.py --describe dist/*.whl

dist/.wheel: $(SOURCES) build/settings $(STAMPS)/build
	@echo "==> building the wheel into dist/ (seconds; about a minute with nvcc)"
	@rm -f dist/*.whl dist/.wheel
	@$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .
	@touch $@

build/settings: FORCE
	@mkdir -p build
	@echo '$(SETTINGS)' | cmp -s - $@ || echo '$(SETTINGS)' > $@

# The environment, in layers, so that `make check` on a fresh machine need not wait for torch.
$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "$(PYTHON) is older than 3.10; name another with PYTHON=")'
	@test -x $(PY) || { echo "==> creating $(VENV)"; $(PYTHON) -m venv "$(ENV)"; }
	@$(PIP) install "pip>=25.1"
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/build: $(STAMPS)/venv pyproject.toml
	@$(PY) -c 'import torch' 2> /dev/null || \
	  { echo "==> installing torch into $(VENV) (some GB, once)"; $(PY) -m pip install "$(TORCH)"; }
	@$(PIP) install "$(TORCH)" --group build
	@touch $@

$(STAMPS)/test $(STAMPS)/coverage $(STAMPS)/bench $(STAMPS)/lint $(STAMPS)/dev: $(STAMPS)/%: $(STAMPS)/venv pyproject.toml
	@echo "==> installing the $* tools into $(VENV)"
	@$(PIP) install --group $*
	@touch $@

clean:
	rm -rf build dist *.egg-info
