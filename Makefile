# make quickstart   train heads, build their tree, export them, measure them, write the report
# make test         the test suite (what needs a GPU is left out)
# make lint         ruff
# make clean        remove the environment and everything built; runs/ stays
#
# The first three set up .venv by themselves; another Python: make test PYTHON=python3.12
# A CPU build of torch, which saves 3 GiB: make quickstart TORCH_INDEX=URL of a package index that has one

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
READERS := $(VENV)/readers
RUN := runs/quickstart
ADVICE := Headstart needs Python 3.11 or newer; name one: make $(MAKECMDGOALS) PYTHON=python3.12

# Nothing but the package registry is reached.
export HF_HUB_OFFLINE := 1
export WANDB_MODE := offline

# Waiting OpenMP threads sleep. By default they spin, and once another process holds one of two cores a training step takes 3 times
# as long and a pass of the target over 64 rows 4 times; asleep 1.8 and 1.3 times. Price: that pass takes up to 1.4 times on an idle
# machine, a training step and a pass over one row the same.
export OMP_WAIT_POLICY := PASSIVE

# A progress bar on a terminal is one line; in a file every state of it is one more.
ifneq ($(shell test -t 2 && echo terminal),terminal)
export TQDM_MININTERVAL := 20
endif

.PHONY: help quickstart test lint clean
.SUFFIXES:

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

# All cores train, up to four: the embedded model is small, and more than two was not measured. (Commands that decode choose their
# threads themselves.)
TRAINING_THREADS = OMP_NUM_THREADS=$(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -lt 4 ] && echo $$n || echo 4)
quickstart: $(RUN)/export/config.json
	$(BIN)/headstart bench speculation --model assets/stdlib-coder --head $(RUN)/export \
	  --head assets/stdlib-coder-medusa --transformers --output $(RUN)/benchmark.json
	$(BIN)/headstart report $(RUN)

# A finished run is kept and used again; an unfinished one goes on from its newest checkpoint.
$(RUN)/head/config.json: | $(READY)
	$(TRAINING_THREADS) $(BIN)/accelerate launch --config_file configs/accelerate/cpu.yaml train/medusa.py --config configs/quickstart.yaml \
	  $$(test -z "$$(ls -A $(RUN) 2>/dev/null)" || echo --resume)

$(RUN)/tree.json: $(RUN)/head/config.json
	$(BIN)/headstart tree $(RUN)

$(RUN)/export/config.json: $(RUN)/head/config.json $(RUN)/tree.json
	rm -rf $(RUN)/export
	$(BIN)/heads.export $(RUN) --format medusa --output $(RUN)/export

# A process per core, up to four, of one thread each: the test models are tiny, and a busy neighbour then costs nothing. Each process
# starts with neighbouring tests, which share what they build, and takes from the others when it is done.
test: $(READERS)
	$(BIN)/pytest -m "not gpu" -n logical --maxprocesses 4 --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) build dist headstart.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "There is no '$(PYTHON)' here. $(ADVICE)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "'$(PYTHON)' is $$($(PYTHON) --version), too old. $(ADVICE)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	  { echo "'$(PYTHON)' cannot make environments: install its venv package (on Debian: python3-venv)." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e ".[dev]"
	@touch $@

# Packages of other projects that read our files in the tests: six seconds. Without what they depend on, for they ask for older
# versions of what is here and for much that reading does not need. Where they cannot be had, that test is skipped.
$(READERS): $(READY)
	@$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps -c constraints.txt speculators hs-connectors loguru \
	  && touch $@ || echo "The speculators library cannot be installed: its tests are skipped." >&2
