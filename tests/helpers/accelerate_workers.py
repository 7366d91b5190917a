"""What ranks of the tests of Accelerate do."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration
from adapter_problem import BATCH, EPOCHS, Network, adam, numbers, own_loop, rows
from local_problem import co2_of, said
from ranks import everywhere
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


def trains_as_a_loop_of_ones_own(_: World, folder: Path, options: dict[str, Any]) -> None:
    """Three epochs, bit for bit; on from a checkpoint within a round, whose model is the consensus.

    All ranks end alike.
    """
    whole = Training(options)
    whole.run()
    end = whole.finish()
    assert everywhere(end) == [end] * 2
    assert end == own_loop(whole.model.seen, options, whole.rates)
    part, saved = Training(options), folder / "saved"
    part.run(until=9)
    part.accelerator.save_state(str(saved))
    with part.co2.consensus(buffers=True):
        consensus = numbers(part.model)
    live = numbers(part.model)
    part.co2.close()
    part.accelerator.free_memory()
    plain = Network(seed=3)
    plain.load_state_dict(load_file(saved / "model.safetensors"))
    assert numbers(plain) == consensus != live
    files = sorted(each.name for each in (saved / "local_updates").iterdir())
    assert files == ["rank0.safetensors", "rank1.safetensors", "state.json"]
    again = Training(options, seed=1)
    again.accelerator.load_state(str(saved))
    assert numbers(again.model) == live
    again.run(9)
    assert again.finish() == end


def refuses_shards_and_a_scaler(_: World, folder: Path) -> None:
    """In one line that says what to use instead."""
    del folder
    for kind, precision, words in (("FSDP", "no", "FSDP"), ("MULTI_GPU", "fp16", "'fp16'")):
        state: Any = SimpleNamespace(distributed_type=kind, mixed_precision=precision)
        network = Network()
        heard = said(lambda: prepare(state, co2_of, network, adam(network), tau=4))  # noqa: B023
        assert words in heard
