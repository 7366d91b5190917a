# make run: the study of the README. make check: before each commit. make test: before each push. make nightly: all the rest.
# CONTRIBUTING.md lists all targets. QUICK=--quick turns a benchmark into a run of seconds. PART=K/N runs a part of nightly.
PYTHON ?= python3
QUICK ?=
VENV := .venv
BIN := $(VENV)/bin
PART ?= 0/1
WORKERS = $(shell $(PYTHON) -c "import os; print(os.cpu_count() or 1)")
PYTEST = $(BIN)/pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder
STAMP := $(VENV)/.installed

.PHONY: run check fast test nightly torch-versions docs bench memory-oracle memory-questions formulas fidelity verify convergence long-study bound-ranking time-to-loss own-module overhead \
  checkpoints explore-speed ssp quantization tasks engines chaos torchft-kills mutants lock audit golden format lint clean

run: $(STAMP)-report
	$(BIN)/co2sim scale --model transnormer-7b --cluster a100-tcp80-calibrated --cluster a100-roce800 \
	  --stack transnormer-2023 --strategy co2.published:tau=48,worker=node,inner=zero2,dtype=bf16,average=leader \
	  --strategy zeropp --strategy zero2:owners=true,bucket=8388608 --strategy ddp \
	  --micro-batch 1 --accumulation 1 --recompute none --gpus 8,16,32,64,128 --tokens 1e11 --set price_per_gpu=a100-80-aws-2026-11 \
	  --published papers/co2/results.toml --out out --report out/report.html

lint: $(STAMP)-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python .ci/prose.py

fast: $(STAMP)-dev
	$(PYTEST) -m "not slow and not dist and not lab and not gpu and not nightly"

check:
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint fast

test: lint
	$(PYTEST) -m "not nightly" --durations=25

nightly: $(STAMP)-dev
	$(PYTEST) -m "nightly or hypothesis" --hypothesis-profile=nightly --part $(PART) --durations=25

# Each in an environment of its own, with CUDA where the index has no other build: 7 GB, removed in the end.
TORCH_VERSIONS ?= 2.9.1 2.14.1

torch-versions: $(addprefix torch-,$(TORCH_VERSIONS))

torch-%:
	$(PYTHON) -m venv out/torch-$*
	out/torch-$*/bin/pip install --quiet torch==$* '.[train,report]' pytest pytest-xdist hypothesis psutil networkx
	out/torch-$*/bin/python -m pytest -n $(WORKERS) -p no:cacheprovider -m "not gpu and not nightly and not lab" tests/realrun
	rm -rf out/torch-$*

# torchtitan needs a newer torch than the other tests take.
.PHONY: torchtitan
torchtitan:
	$(PYTHON) -m venv out/torchtitan
	out/torchtitan/bin/pip install --quiet torch==2.14.1 '.[torchtitan]' pytest pytest-xdist hypothesis psutil
	out/torchtitan/bin/python -m pytest -p no:cacheprovider tests/realrun/adapters/test_torchtitan.py
	rm -rf out/torchtitan

docs: $(STAMP)-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file .mkdocs.yml
	@echo "open out/docs/index.html"

.PHONY: docs-numbers
docs-numbers: $(STAMP)-dev
	$(BIN)/python .ci/docs_numbers.py

bench: $(STAMP)-dev
	$(BIN)/python benchmarks/speed.py $(QUICK)
	$(BIN)/python benchmarks/required_bandwidth.py $(QUICK)
	$(BIN)/python benchmarks/hpz_group.py $(QUICK)
	$(BIN)/python benchmarks/plan_search.py $(QUICK)
	$(BIN)/python benchmarks/buyer_questions.py $(QUICK)

# TABLE=measurements.csv of matrix products, or QUICK=--quick.
products: $(STAMP)-dev
	$(BIN)/python benchmarks/products.py $(if $(TABLE),--table $(TABLE)) $(QUICK)

memory-oracle: $(STAMP)-dev
	$(BIN)/python benchmarks/memory_oracle.py $(QUICK)

memory-questions: $(STAMP)-dev
	$(BIN)/python benchmarks/memory_questions.py $(QUICK)

formulas: $(STAMP)-dev
	$(BIN)/python benchmarks/formulas.py $(QUICK)

fidelity: $(STAMP)-dev
	$(BIN)/python benchmarks/fidelity.py sleep $(QUICK)
	$(BIN)/python benchmarks/fidelity.py flops $(QUICK)
	$(BIN)/python benchmarks/fidelity.py hiding $(QUICK)
	$(BIN)/python benchmarks/fidelity.py invented $(QUICK)
	$(BIN)/python benchmarks/fidelity.py sites $(QUICK)
	$(BIN)/python benchmarks/fidelity.py leaves $(QUICK)
	$(BIN)/python benchmarks/leaves.py $(QUICK)

verify: $(STAMP)-dev
	PYTHONPATH=tests $(BIN)/python -m theory --out out/verify $(QUICK)
	$(if $(QUICK),,cp out/verify/report.md benchmarks/results/theory.md; cp out/verify/bound.png examples/)

convergence: $(STAMP)-dev
	$(BIN)/python benchmarks/convergence.py $(QUICK)

long-study: $(STAMP)-dev
	$(BIN)/python benchmarks/long_study.py $(QUICK)

bound-ranking: $(STAMP)-dev
	$(BIN)/python benchmarks/bound_ranking.py $(QUICK)

time-to-loss: $(STAMP)-dev
	$(BIN)/python -m pip install --quiet --editable '.[peers]'
	$(BIN)/python benchmarks/time_to_loss.py $(QUICK)

ssp: $(STAMP)-dev
	$(BIN)/python benchmarks/ssp.py $(QUICK)

quantization: $(STAMP)-dev
	$(BIN)/python benchmarks/quantization.py $(QUICK)

explore-speed: $(STAMP)-dev
	$(BIN)/python benchmarks/explore.py $(QUICK)

engines: $(STAMP)-dev
	$(BIN)/python benchmarks/engines.py $(QUICK)

checkpoints: $(STAMP)-dev
	$(BIN)/python benchmarks/checkpoints.py $(QUICK)

tasks: $(STAMP)-dev
	$(BIN)/python benchmarks/tasks.py $(QUICK)

chaos: $(STAMP)-dev
	$(BIN)/python benchmarks/chaos.py $(QUICK)

torchft-kills: $(STAMP)-dev
	$(BIN)/python -m pip install --quiet --editable '.[torchft]'
	$(BIN)/python benchmarks/torchft_kills.py $(QUICK)

own-module: $(STAMP)-dev
	$(BIN)/python benchmarks/own_module.py $(QUICK)

overhead: $(STAMP)-dev
	$(BIN)/python benchmarks/overhead.py $(QUICK)

# MODULE is a file or a folder of the code, TESTS are those that shall notice its faults. In a clone of HEAD.
MODULE ?= co2sim/common/units.py
TESTS ?= tests/co2sim/common

mutants: export PATH := $(CURDIR)/$(BIN):$(PATH)
mutants: export PYTHONPATH := $(CURDIR)/out/mutants
mutants: $(STAMP)-dev
	$(BIN)/python -m pip install --quiet --editable '.[mutants]'
	rm -rf out/mutants && git clone --quiet . out/mutants
	sed -i 's|MODULE"|$(MODULE)"|; s|TESTS"|$(TESTS)"|' out/mutants/.ci/mutants.toml
	cd out/mutants && cosmic-ray init .ci/mutants.toml mutants.sqlite && cr-filter-operators mutants.sqlite .ci/mutants.toml \
	  && cosmic-ray --verbosity INFO exec .ci/mutants.toml mutants.sqlite && cr-report --surviving-only --show-diff mutants.sqlite

# Of torch, the build for CPUs: with CUDA it has other requirements. TORCH_BACKEND= takes what the index has.
TORCH_BACKEND ?= --torch-backend cpu

lock: $(BIN)/python
	$(BIN)/python -m pip install --quiet uv==0.13.9
	$(BIN)/uv pip compile pyproject.toml --quiet --extra dev --extra chakra --universal --python-version 3.11 \
	  --generate-hashes --no-emit-package torch --no-annotate --custom-compile-command "make lock" $(TORCH_BACKEND) --upgrade \
	  --output-file .requirements-dev.txt

audit: $(STAMP)-dev
	$(BIN)/python -m pip install --quiet --editable '.[audit]'
	@$(BIN)/python .ci/audit.py osv

golden: $(STAMP)-dev
	$(BIN)/pytest --update-golden tests/co2sim/strategies/test_strategies.py

format: $(STAMP)-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) out

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(STAMP)-report: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[report]'
	touch $@ $(STAMP)

$(STAMP)-dev: pyproject.toml .requirements-dev.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes --requirement .requirements-dev.txt
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(STAMP)

$(STAMP)-docs: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@ $(STAMP)
