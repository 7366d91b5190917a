"""What ranks of the tests of another number of ranks do."""

import warnings
from pathlib import Path
from typing import Any

from adapter_problem import Network, adam, numbers
from local_problem import batch, co2_of

from realrun.adapters import rank_files
from realrun.execute.world import World


def save(world: World, folder: str) -> None:
    """Six steps of rounds of four; the consensus besides, as a library would write it."""
    model = Network()
    optim = adam(model)
    with co2_of(model, optim, tau=4, delay=2) as co2:
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
        co2_of(model, adam(model), tau=4, delay=2) as co2,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        rank_files.load(Path(folder) / rank_files.FOLDER, co2)
    began = str(numbers(model)[: 5 * 7]) == (Path(folder) / "agreed").read_text()
    return {"began": began, "told": [str(one.message) for one in told]}
