# What a person does with this project; `make help` lists it. Needs Python 3.11 or newer, make and a C compiler; no root.

PYTHON ?= python3
VENV   ?= .venv
OUT    ?= results/sweep

RUN    := $(VENV)/bin/python
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install sweep bench results published scale shares planners replays gpu test test-slow docs lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12   which Python makes the virtual environment (3.11 or newer)"
	@echo "  OUT=results/sweep   where make sweep writes"
	@echo "  SHARD=2/3           the second third of make test-slow"

install: $(STAMP) ## make .venv with everything in it; the other targets do so when needed

$(STAMP): setup.cfg constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than Python 3.11: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

sweep: $(STAMP) ## train 2 ranks with every strategy and schedule, print the table, draw tradeoff.png (minutes)
	@if [ -e "$(OUT)/multirun.yaml" ] && [ -e "$(OUT)/sweep.json" ]; then \
		before="$(OUT:/=)-$$(date -r "$(OUT)/sweep.json" +%Y%m%d-%H%M%S)"; \
		mv "$(OUT)" "$$before" && echo "the sweep before is in $$before"; \
	fi  # that has ended; others go on
	$(RUN) experiments/train.py experiment=quick hydra.sweep.dir="$(OUT)"

bench: $(STAMP) ## how much faster than no overlap the schedulers are, in interleaved runs (minutes)
	$(RUN) experiments/compare.py experiment=bench hydra.run.dir=results/bench

results: $(STAMP) ## measure mdcs beside other engines, five rounds in turns, and write docs/results.md (an hour)
	$(RUN) -m benchmarks.results

published scale shares robustness planners replays: $(STAMP)
published: ## predict runs that others have published, and write docs/predictions.md (seconds)
scale: ## predict what mdcs gains for Llama 3 on large clusters, and write docs/predictions.md (minutes)
shares: ## predict where memory is best divided between strategies and schedule, and write docs/predictions.md (minutes)
robustness: ## predict what plans lose where costs are shaken, and write docs/predictions.md (minutes)
planners: ## compare joint with heuristics and its proven bound on seeded instances (minutes)
replays: ## measure how many plans the simulator replays in a second
published scale shares robustness planners:
	$(RUN) -m benchmarks.$@
replays:
	$(RUN) -m benchmarks.planners --replays

gpu: $(STAMP) ## qualify a machine with a GPU: tests, steps beside DDP's and FSDP2's, overlap (under ten minutes)
	$(RUN) -m torch.utils.collect_env
	$(RUN) -m pytest -m gpu -rP tests/mdcs/runtime/test_cuda.py tests/mdcs/gpu
	PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True $(RUN) -m pytest -m gpu -rP tests/mdcs/gpu -k allocator

# The tests start Python hundreds of times: what is compiled is kept, whatever the environment says.
test test-slow: export PYTHONDONTWRITEBYTECODE =
STEAL := --dist worksteal  # a share each; who has ended takes over of the others'
SHARD ?= 1/1

test: $(STAMP) ## run the tests (minutes)
	$(RUN) -m pytest -n 2 $(STEAL) -m 'not (slow or hypothesis or gpu)'

test-slow: $(STAMP) ## run the other tests: random plans, more ranks, other engines, shaped and emulated clusters (minutes)
	$(RUN) -m pytest -n 3 $(STEAL) --shard $(SHARD) -m 'slow or hypothesis'

docs: $(STAMP) ## build docs/ as a site in docs/_build/html; warnings are errors
	$(RUN) -m sphinx -W --keep-going -q docs docs/_build/html
	@echo docs/_build/html/index.html

lint: $(STAMP) ## check style, docstrings, who imports whom, and types
	$(RUN) -m ruff check .
	$(VENV)/bin/lint-imports --no-cache --no-logo
	$(RUN) -m mypy

format: $(STAMP) ## sort imports and fix what can be fixed
	$(RUN) -m ruff check --fix .

clean: ## remove the virtual environment and caches; never what runs wrote
	rm -rf $(VENV) build docs/_build docs/options.md docs/notebooks *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
