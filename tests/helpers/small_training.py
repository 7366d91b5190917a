"""A training of `realrun train` that takes less than a second."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from realrun.execute.world import World
from realrun.train import TrainSettings
from realrun.train.log import History
from realrun.train.tasks import text

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of parts of its own
    from realrun.train import parallelize
    from realrun.train.loop import train

__all__ = ["SMALL", "parallelize", "train", "trained"]

SMALL: dict[str, Any] = {
    "size": "tiny",
    "context": 16,
    "batch": 8,
    "warmup": 4,
    "lr": 1e-2,
    "log_every": 4,
    "checkpoint_every": 0,
}


def trained(
    world: World, folder: Path | None = None, *, resume: bool = False, **settings: Any
) -> History:
    """By these settings; an eighth of the usual characters is validated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "_VALIDATED", 4096)
        return train(TrainSettings(**{**SMALL, **settings}), world, folder, resume=resume)
