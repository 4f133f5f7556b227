# Every command that a contributor needs. `make` alone lists them.
#
# PYTHON chooses the interpreter of a new environment: PYTHON=python3.12 make test
PYTHON ?= python3
VENV := .venv
DEMO_ARGS ?=
BENCH_ARGS ?=
PYTEST_ARGS ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --quiet --disable-pip-version-check --no-input
# Without build isolation pip builds with the setuptools of the environment and fetches nothing for the build.
INSTALL := $(PIP) install --no-build-isolation --constraint $(VENV)/keep.txt
# Is there a torch in the base interpreter, and is it new enough for us?
BASE_HAS_TORCH := import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
# Makes the base interpreter's packages visible in the environment, after its own. `venv --system-site-packages` is not
# enough: where the base interpreter is itself an environment, it would show the packages of that one's base.
SHARE_BASE := import sys; print("import site; list(map(site.addsitedir, %r))" \
	% [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))])
# The torch and Triton of the environment, as constraints: no later installation may replace them.
KEEP := import importlib.metadata as m; \
	print(*{f"{d.name}=={d.version}" for d in m.distributions() if d.name in ("torch", "triton")}, sep="\n")

.PHONY: help demo test lint types unit bench bench-cpu size clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-11s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## set up, then run the main job: a real MoE model with its experts in INT8 and FP8
	$(VENV)/bin/lowgmm demo $(DEMO_ARGS)

test: lint types unit ## set up, then lint, check types and run the tests (on the GPU too, where there is one)

lint: $(VENV)/.dev ## ruff: rules and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(VENV)/.dev ## mypy, strict
	$(PY) -m mypy

unit: $(VENV)/.dev ## pytest; PYTEST_ARGS="-k routing -x" narrows it
	$(PY) -m pytest $(PYTEST_ARGS)

bench: $(VENV)/.demo ## on a GPU: time every case in every format, and plot; BENCH_ARGS="--cases gpt-oss-16 --limit 60"
	$(PY) bench/gmm.py --output bench/results/gmm.jsonl $(BENCH_ARGS)

bench-cpu: $(VENV)/.demo ## on a CPU: expert layers beside torch, oneDNN and ggml; BENCH_ARGS="--ggml SOURCE BUILD"
	$(PY) bench/cpu_layer.py --output bench/results/cpu_layer.jsonl $(BENCH_ARGS)
	$(PY) bench/plot_cpu.py bench/results/cpu_layer.jsonl bench/results/cpu_layer.svg

size: ## lines of each file, longest first
	@find src tests bench examples -name '*.py' -o -name '*.[ch]' 2>/dev/null | xargs wc -l | sort -rn

clean: ## remove the environment and everything generated
	rm -rf $(VENV) build dist src/*.egg-info src/lowgmm/native/*.so .pytest_cache .mypy_cache .ruff_cache
	find src tests bench examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# The environment, in three steps, each with a stamp so that the next run skips it. A new environment is made when the
# torch pin changes; the package is installed again when pyproject.toml does.

$(VENV)/.torch: requirements/torch.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "lowgmm needs Python 3.10 or newer; choose one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "$(PYTHON) lacks the venv module (Debian and Ubuntu: install python3-venv)" >&2; exit 1; }
	@echo "== new environment in $(VENV)"
	$(PYTHON) -m venv --clear $(VENV)
	@if $(PYTHON) -c '$(BASE_HAS_TORCH)' 2>/dev/null; then \
		echo "== keeping the torch that $(PYTHON) already has"; \
		$(PYTHON) -c '$(SHARE_BASE)' > "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"; \
	else \
		echo "== installing torch (a few minutes the first time)"; \
		$(PIP) install -r $<; \
	fi
	@$(PY) -c '$(KEEP)' > $(VENV)/keep.txt
	@$(PY) -W ignore -c 'import torch; print("== torch", torch.__version__, "in", torch.__path__[0])'
	$(PIP) install --constraint $(VENV)/keep.txt 'setuptools>=77'
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml $(wildcard src/lowgmm/native/*.[ch])
	@echo "== installing lowgmm and what its demo needs"
	$(INSTALL) -e '.[demo]'
	@touch $@

# CPU builds of torch bring no Triton; the tests then take the pinned one. A Triton that is already there stays.
$(VENV)/.dev: $(VENV)/.torch pyproject.toml $(wildcard src/lowgmm/native/*.[ch])
	@echo "== installing lowgmm and its development tools"
	@extras=dev; $(PY) -c 'import triton' 2>/dev/null || extras=dev,interpreter; \
		echo "$(INSTALL) -e .[$$extras]"; $(INSTALL) -e ".[$$extras]"
	@touch $@
