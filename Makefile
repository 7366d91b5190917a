# make run: the main job. make test: what CI runs. make bench: the speed of the simulator.
# make docs: the pages of docs/ as a site in out/docs.
# make fidelity: predicted against measured in the lab (root, 30 min). make failures: ranks that die.
# make convergence: what every strategy learns (an hour). make time-to-loss, make peers: in the lab (root).
# make overhead: what CO2 itself costs (a few minutes).
# make verify: the convergence bound, checked.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test docs bench fidelity verify failures convergence time-to-loss peers overhead golden format clean

run: $(STAMP)
	$(BIN)/co2sim scale --model transnormer-7b --cluster a100-tcp80-calibrated --cluster a100-roce800 \
	  --set gpu=a100-80-transnormer --strategy co2:tau=48,worker=node,inner=zero2,dtype=bf16,average=leader \
	  --strategy zeropp --strategy zero2:owners=true,bucket=8388608 --strategy ddp \
	  --gpus 8,16,32,64,128 --published papers/co2/results.toml --out out

test: $(STAMP)-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/pytest -n auto

docs: $(STAMP)-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file .mkdocs.yml
	@echo "open out/docs/index.html"

bench: $(STAMP)-dev
	$(BIN)/python benchmarks/speed.py

fidelity: $(STAMP)-dev
	$(BIN)/python benchmarks/fidelity.py sleep
	$(BIN)/python benchmarks/fidelity.py flops
	$(BIN)/python benchmarks/fidelity.py hiding

verify: $(STAMP)-dev
	$(BIN)/co2analysis verify --out out/verify

failures: $(STAMP)-dev
	$(BIN)/python benchmarks/failures.py

convergence: $(STAMP)-dev
	$(BIN)/python benchmarks/convergence.py

time-to-loss: $(STAMP)-dev
	$(BIN)/python benchmarks/time_to_loss.py

peers: $(STAMP)-dev
	$(BIN)/python -m pip install --quiet --editable '.[peers]'
	$(BIN)/python benchmarks/peers.py

overhead: $(STAMP)-dev
	$(BIN)/python benchmarks/overhead.py

golden: $(STAMP)-dev
	$(BIN)/pytest --update-golden tests/test_strategies.py

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

$(STAMP)-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(STAMP)

$(STAMP)-docs: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@ $(STAMP)
