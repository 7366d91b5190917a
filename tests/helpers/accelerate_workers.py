"""What ranks of the tests of Accelerate do."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration
from adapter_problem import BATCH, EPOCHS, Network, adam, numbers, own_loop, rows
from local_problem import co2_of, said
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from realrun.adapters.accelerate import prepare
from realrun.execute.world import World


class Training:
    """A loop of Accelerate as users write it, with a schedule and shuffled data."""

    def __init__(self, options: dict[str, Any], seed: int = 0) -> None:
        seeded = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7)
        self.accelerator = Accelerator(cpu=True, dataloader_config=seeded)
        network = Network(seed)
        optim = adam(network)
        loader = DataLoader(rows(), BATCH, shuffle=True)
        schedule = torch.optim.lr_scheduler.LinearLR(optim, 1.0, 0.5, 40)
        given = (network, optim, loader, schedule)
        self.co2, self.model, self.optim, self.loader, self.schedule = prepare(
            self.accelerator, co2_of, *given, **options
        )
        self.rates: list[float] = []

    def run(self, done: int = 0, until: int = 10**6) -> None:
        """From step `done`, in as many epochs as there are, or until a step."""
        length = len(self.loader)
        for epoch in range(done // length, EPOCHS):
            self.loader.set_epoch(epoch)
            skip = done % length if epoch == done // length else 0
            for given, wanted in skip_first_batches(self.loader, skip) if skip else self.loader:
                loss = self.model(given, wanted)["loss"]
                self.accelerator.backward(loss)
                self.rates.append(self.optim.param_groups[0]["lr"])
                self.optim.step()
                self.schedule.step()
                self.optim.zero_grad()
                done += 1
                if done == until:
                    return

    def finish(self) -> list[float]:
        """Where it ends."""
        self.co2.finish(buffers=True)
        self.accelerator.free_memory()
        return numbers(self.model)


def trained(_: World, folder: str, cases: list[dict[str, Any]], stop: int) -> list[dict[str, Any]]:
    """Three epochs; the same batches in a loop of our own; on from a checkpoint within a round."""
    return [_trained(Path(folder) / str(options), options, stop) for options in cases]


def _trained(place: Path, options: dict[str, Any], stop: int) -> dict[str, Any]:
    whole = Training(options)
    whole.run()
    end = whole.finish()
    part = Training(options)
    part.run(until=stop)
    part.accelerator.save_state(str(place))
    with part.co2.consensus(buffers=True):
        kept = numbers(part.model)
    own = numbers(part.model)
    part.co2.close()
    part.accelerator.free_memory()
    plain = Network(seed=3)
    plain.load_state_dict(load_file(place / "model.safetensors"))
    again = Training(options, seed=1)
    again.accelerator.load_state(str(place))
    went_on = numbers(again.model) == own
    again.run(stop)
    return {
        "end": end,
        "own": own_loop(whole.model.seen, options, whole.rates),
        "went on": went_on,
        "again": again.finish(),
        "saved": numbers(plain) == kept != own,
        "files": sorted(one.name for one in (place / "local_updates").iterdir()),
    }


def refused(_: World, **__: str) -> list[str]:
    """What is sharded, and half precision with a scaler."""
    told = []
    for state in (("FSDP", "no"), ("MULTI_GPU", "fp16")):
        given: Any = SimpleNamespace(distributed_type=state[0], mixed_precision=state[1])
        network = Network()
        told.append(said(lambda: prepare(given, co2_of, network, adam(network), tau=4)))  # noqa: B023
    return told
