"""Names of the files in a training's folder, and which training it is of. Needs no torch."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from co2sim.errors import OptionError
from realrun.errors import CheckpointError

LOG = "log.csv"
RECORD = "train.json"
FIGURE = "loss.png"
MODEL = "model.pt"
ESTIMATE = "estimate.json"
CHECKPOINTS = "checkpoints"

IDENTITY = "identity.json"
"""In a checkpoint: what the training is that it is of."""

_NAME = re.compile(r"step-(\d+)")


def check_new(folder: Path) -> None:
    """Refuse to write a second training over a first one."""
    if (folder / LOG).exists():
        raise OptionError(
            f"{folder} holds a training run already: go on with --resume, or choose another --out"
        )


def checkpoint_name(step: int) -> str:
    """The name of a complete checkpoint."""
    return f"step-{step:06d}"


def checkpoints(folder: Path) -> list[Path]:
    """All whole checkpoints of a training, the last one last."""
    found = (folder / CHECKPOINTS).glob("step-*")
    return sorted((path for path in found if _NAME.fullmatch(path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step after which it was written."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


def identity_text(identity: Mapping[str, Any], ranks: int) -> str:
    """What a checkpoint says of the training that it is of."""
    return json.dumps({**identity, "ranks": ranks}, indent=2) + "\n"


def check_identity(checkpoint: Path, identity: Mapping[str, Any], ranks: int) -> None:
    """Raise CheckpointError unless all that is given here is so in the checkpoint."""
    try:
        seen = json.loads((checkpoint / IDENTITY).read_text())
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"cannot read the checkpoint {checkpoint}: {reason}") from error
    for name, mine in json.loads(identity_text(identity, ranks)).items():
        if seen.get(name) != mine:
            raise CheckpointError(
                f"{checkpoint} is of another training: its {name} is {seen.get(name)!r}, not"
                f" {mine!r}"
            )
