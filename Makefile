# `make pretrain` and `make test` are all a newcomer needs; each creates the environment in .venv when it is missing.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

# uv does not read pip's list of local wheel folders: pass it on where it is set.
# --compile-bytecode: where Python may not write it at run time, every start of a process would compile torch anew.
QUIET := $$(test -t 2 || echo --quiet)  # on a terminal, show how far a download of gigabytes is
UV := UV_FIND_LINKS="$${UV_FIND_LINKS:-$$PIP_FIND_LINKS}" $(BIN)/uv pip install $(QUIET) --compile-bytecode --python $(BIN)/python -c constraints.txt --override overrides.txt

# More flags of the run: make pretrain PRETRAIN_FLAGS="--train.max_tokens 50000 --eval.max_iters 1"
PRETRAIN_FLAGS ?=

.PHONY: pretrain test test-all test-faults test-gpu lint format docs wheel clean train-free-fsdp train-baseline-fsdp compare

pretrain: $(VENV)/.core
	$(BIN)/toolkit pretrain --config config_hub/pretrain/default.yaml --resume auto $(PRETRAIN_FLAGS)

# A file's tests share fixtures, so that they stay in one worker; conftest.py orders the files.
# Bytecode is written even where the shell forbids it: the tests start hundreds of processes.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# One extension's tests: make test WALL=doctor
test: $(VENV)/.test
	$(PYTEST) $(if $(WALL),extensions/$(WALL)/tests)

test-all: $(VENV)/.test
	$(PYTEST) -m "slow or not slow"

# Hours; FAULTS=quick: 15 minutes. A second start continues. Writes tests/faults/faults.json and tutorials/reliability.md.
test-faults: $(VENV)/.test
	$(BIN)/python -m tests.faults $(if $(filter quick,$(FAULTS)),--quick --minutes 14)

# On a machine with CUDA, about 10 minutes; without it, says that nothing was run.
test-gpu: $(VENV)/.test
	$(BIN)/python -m pytest -m gpu
	$(BIN)/toolkit doctor --prove

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell toolkit extensions tests scripts tutorials docs config_hub *.md
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A small Free Transformer and its baseline (extensions/free_transformer), each sharded over all GPUs of this machine,
# without one over two processes; then a picture and a table of both.
FREE := extensions/free_transformer
DEVICES := $(BIN)/python -c "import sys, torch; found = torch.cuda.device_count() or 2; n = 1 << (found.bit_length() - 1); \
  n == found or print(f'note: {n} of {found} GPUs, to divide the global batch of 64', file=sys.stderr); \
  print('--devices', n, '--train.micro_batch_size', 64 // n)"

train-free-fsdp: $(VENV)/.free
	$(BIN)/toolkit pretrain free-transformer-tiny --config $(FREE)/letters.yaml $$($(DEVICES)) \
	  --out_dir out/free-transformer --resume auto

train-baseline-fsdp: $(VENV)/.free
	$(BIN)/toolkit pretrain free-baseline-tiny --config $(FREE)/letters.yaml $$($(DEVICES)) \
	  --out_dir out/free-baseline --resume auto

compare: $(VENV)/.free
	$(BIN)/python -m toolkit_free_transformer.compare

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "build/site/index.html is ready; with search: $(BIN)/python -m http.server -d build/site"

# A wheel, installed in an environment without the source tree, is complete and trains two steps.
wheel: $(VENV)/.test
	$(BIN)/python -m pytest -m slow tests/test_packaging.py

$(VENV)/bin/uv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(QUIET) uv

$(VENV)/.core: $(VENV)/bin/uv pyproject.toml constraints.txt overrides.txt
	@echo "Installing toolkit into $(VENV) (once)"
	$(UV) -e '.[plot,serve]'
	touch $@

$(VENV)/.test: $(VENV)/.core $(wildcard extensions/*/pyproject.toml)
	@echo "Installing what the tests need into $(VENV) (once)"
	$(UV) -e '.[test]' $(addprefix -e ,$(dir $(wildcard extensions/*/pyproject.toml)))
	touch $@

$(VENV)/.free: $(VENV)/.core extensions/free_transformer/pyproject.toml
	$(UV) -e extensions/free_transformer
	touch $@

$(VENV)/.docs: $(VENV)/.core
	@echo "Installing what the documentation needs into $(VENV) (once)"
	$(UV) -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
