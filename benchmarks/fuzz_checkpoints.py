"""Checkpoints that nobody means well, with and without checksums that fit."""

import contextlib
import json
import random
import tempfile
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fuzz_inputs as made_of
import torch
from fuzz_inputs import Made

from co2sim.schedule import Layout
from realrun.train import checkpoint
from realrun.train.manifest import MANIFEST, FileSum, Manifest

_STEP = 4
_ALONE: Any = SimpleNamespace(rank=0, layout=Layout(1, 1), device=torch.device("cpu"))
_IDENTITY = {"strategy": "co2(tau=4)", "lr": 0.01}


class OtherStateError(Exception):
    """A checkpoint that is not as it was written was read without a word."""


def damaged(rng: random.Random, drawn: tuple[Any, ...]) -> tuple[Made, Any]:
    """A checkpoint with one file changed; every other time its manifest says that this is right."""
    files = dict(_written())
    name = rng.choice(sorted(files))
    before = files[name]
    if rng.random() < 0.03:  # noqa: PLR2004 - a few are far too large
        files[name] = before + b" " * (1 << 24)
    elif name.endswith(".json") and rng.random() < 0.5:  # noqa: PLR2004 - half of them
        files[name] = made_of.as_json(made_of.changed(json.loads(before), rng, drawn))
    else:
        files[name] = made_of.bytewise(before, rng)
    fits = name != MANIFEST and rng.random() < 0.5  # noqa: PLR2004
    if fits:
        named = {one: data for one, data in files.items() if one != MANIFEST}
        sums = {one: FileSum(len(data), sha256(data).hexdigest()) for one, data in named.items()}
        files[MANIFEST] = Manifest(_STEP, 1, sums).text().encode()

    def read() -> None:
        found = checkpoint.load(Path(f"checkpoints/step-{_STEP}"), _IDENTITY, _ALONE)
        if not fits and repr(found) != repr(_state()):
            raise OtherStateError(name)

    placed = {f"checkpoints/step-{_STEP}/{one}": data for one, data in files.items()}
    return Made(placed, ["load", name, *(["as if written so"] if fits else [])]), read


def _state() -> dict[str, Any]:
    return {
        "model": [torch.arange(12.0).view(3, 4), torch.ones(3, dtype=torch.bfloat16)],
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "betas": (0.9, 0.95)},
        "losses": [4.5, float("inf")],
    }


@cache
def _written() -> tuple[tuple[str, bytes], ...]:
    """The files of a checkpoint."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        place = checkpoint.save(Path(name), _STEP, _state(), _IDENTITY, _ALONE)
        return tuple((one.name, one.read_bytes()) for one in sorted(place.iterdir()))
