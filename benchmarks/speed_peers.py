"""Other simulators beside ours, where they are installed: their own examples, one call after ours.

Calculon: `CALCULON` names a checkout, whose models and systems are read; SimuMax: the package with
its own configurations; ASTRA-sim: `ASTRA_SIM` is a whole command. Each computes a training step of
a model of 7 or 8 billion parameters, or what the command says. Loading files does not count.
Sources: calculon/llm/runner.py of calculon-ai/calculon, examples/perf_llama3_8b_tp2.py of
MooreThreads/SimuMax.
"""

import importlib.util
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

Call = Callable[[], object]

ABSENT = "not installed"


def found() -> dict[str, Call | str]:
    """By name: what runs a peer once, or why it is not here."""
    makers = {"Calculon": _calculon, "SimuMax": _simumax, "ASTRA-sim": _astra_sim}
    peers: dict[str, Call | str] = {}
    for name, make in makers.items():
        try:
            peers[name] = make() or ABSENT
        except Exception as error:  # noqa: BLE001 - another version of a peer: ours goes on
            peers[name] = f"cannot be run: {type(error).__name__}: {error}"
    return peers


def _calculon() -> Call | None:
    checkout = os.environ.get("CALCULON")
    if checkout is None:
        return None
    folder = Path(checkout)
    sys.path.append(checkout)
    llm, system = import_module("calculon.llm").Llm, import_module("calculon.system").System

    def read(path: str) -> object:
        return json.loads((folder / path).read_text())

    model = llm.Application(read("models/llama2-7b.json"))
    execution = read("examples/3072_t1_p1_d1_mbs1_full.json")
    machine = read("systems/a100_80e.json")

    def call() -> None:
        one, hardware = llm(model, logging.getLogger("calculon")), system(machine)
        one.compile(hardware, llm.Execution.from_json(execution))
        one.run(hardware)

    return call


def _simumax() -> Call | None:
    if importlib.util.find_spec("simumax") is None:
        return None
    config, files = import_module("simumax.core.config"), import_module("simumax.utils")
    perf = import_module("simumax.core.perf_llm").PerfLLM
    strategy = config.StrategyConfig.init_from_config_file(
        files.get_simu_strategy_config("tp2_pp1_dp4_mbs1")
    )
    model = config.ModelConfig.init_from_config_file(files.get_simu_model_config("llama3-8b"))
    system = config.SystemConfig.init_from_config_file(files.get_simu_system_config("a100_pcie"))

    def call() -> None:
        one = perf()
        one.configure(strategy_config=strategy, model_config=model, system_config=system)
        one.run_estimate()

    return call


def _astra_sim() -> Call | None:
    command = shlex.split(os.environ.get("ASTRA_SIM", ""))
    if not command or shutil.which(command[0]) is None:
        return None
    return lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
