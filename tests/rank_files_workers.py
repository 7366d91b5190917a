"""What ranks of the tests of another number of ranks do."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from adapter_problem import Network, adam, numbers
from local_problem import batch

from co2sim.errors import Co2simError
from realrun.adapters import rank_files
from realrun.algorithms import CO2
from realrun.execute.world import World
from realrun.train.folder import STATE, state_text


def save(world: World, folder: str) -> None:
    """Six steps of rounds of four; the consensus besides, as a library would write it."""
    model = Network()
    optim = adam(model)
    with CO2(model, optim, tau=4, delay=2) as co2:
        for step in range(6):
            optim.zero_grad()
            model(*batch(world.rank, step))["loss"].backward()
            optim.step()
        rank_files.save(Path(folder) / rank_files.FOLDER, co2)
        with co2.consensus():
            if not world.rank:
                (Path(folder) / "agreed").write_text(str(numbers(model)[: 5 * 7]))


def load(world: World, folder: str) -> dict[str, Any]:
    """On one rank."""
    del world
    model = Network(seed=1)
    with (
        CO2(model, adam(model), tau=4, delay=2) as co2,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        rank_files.load(Path(folder) / rank_files.FOLDER, co2)
    began = str(numbers(model)[: 5 * 7]) == (Path(folder) / "agreed").read_text()
    return {"began": began, "told": [str(one.message) for one in told]}


def crafted(world: World, folder: str) -> list[str]:
    """What is told of files with right checksums, and of two optimizers where one was saved."""
    del world
    place = Path(folder) / rank_files.FOLDER
    path = place / STATE
    whole = path.read_bytes()
    parts = {name: part for name, part in json.loads(whole).items() if name != "sha256"}
    forms: list[dict[str, Any]] = [{}, *({**parts, "states": [one]} for one in ([], 3, "x", {}))]
    told = []
    for content in [*map(state_text, forms), whole]:
        path.write_bytes(content)
        model = Network()
        halves = [adam(layer) for layer in model.layers if list(layer.parameters())][:1]
        rest = [p for layer in list(model.layers)[1:] for p in layer.parameters()]
        optims = [*halves, torch.optim.AdamW(rest)] if content == whole else adam(model)
        try:
            with CO2(model, optims, tau=4, delay=2) as co2:
                rank_files.load(place, co2)
        except Co2simError as error:
            told.append(f"{type(error).__name__}: {error}")
    return told
