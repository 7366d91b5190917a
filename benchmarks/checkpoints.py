"""What a checkpoint costs, beside torch.save and plain safetensors.

    python benchmarks/checkpoints.py            # a minute; --quick: too few to mean anything

A rank holds a GPT, the state of AdamW, and three vectors of CO2. The three ways take turns. Writing
ends on the disk (fsync); reading finds the files in memory. Writes checkpoints.md.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import safetensors.torch
import torch
from reports import machine, made_by, parser, publish, table

from realrun.train import checkpoint
from realrun.train.folder import Saved
from realrun.train.tasks.presets import GPTS
from realrun.train.tasks.text import GPT


def state_of(size: str) -> dict[str, Any]:
    """What a rank saves."""
    torch.manual_seed(0)
    model = GPT(GPTS[size])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    vectors = {name: torch.randn(GPTS[size].parameters) for name in ("anchor", "momentum", "own")}
    held = [parameter.detach() for parameter in model.parameters()]
    return {"model": held, "optimizer": optimizer.state_dict(), "outer": vectors}


def seconds(work: Callable[[], object], written: Path | None = None) -> float:
    """How long it takes; what it has written reaches the disk."""
    start = time.perf_counter()
    work()
    if written:
        with written.open("rb") as file:
            os.fsync(file.fileno())
    return time.perf_counter() - start


def measured(size: str, times: int, place: Path) -> list[list[float]]:
    """Seconds to write and to read, of each way, time by time; the first time does not count."""
    state = state_of(size)
    named: dict[str, torch.Tensor] = {}
    checkpoint.split(state, "", named)
    ours, theirs, plain = place / "ours", place / "torch.pt", place / "plain.safetensors"
    found = []
    for _ in range(times + 1):
        row = [seconds(lambda: checkpoint.write(ours, state, {}, 0))]
        row += [seconds(lambda: torch.save(state, theirs), theirs)]
        row += [seconds(lambda: safetensors.torch.save_file(named, plain), plain)]
        row += [seconds(lambda: checkpoint.read(ours, Saved.of(ours), 0))]
        row += [seconds(lambda: torch.load(theirs, weights_only=True))]
        row += [seconds(lambda: safetensors.torch.load(plain.read_bytes()))]
        found.append(row)
    return found[1:]


def main() -> int:
    """Measure and write."""
    options = parser(__doc__, "the smallest model, a few times").parse_args()
    rows = []
    times, sizes = (2, ["tiny"]) if options.quick else (11, ["mini", "small", "large"])
    for size in sizes:
        with tempfile.TemporaryDirectory() as name:
            found = measured(size, times, Path(name))
        titles = (f"{do}: {how}" for do in ("write", "read") for how in ("ours", "torch", "plain"))
        cells = (f"{median(column) * 1e3:,.0f}" for column in zip(*found, strict=True))
        row = {"GPT": size, "MB": f"{6 * 4 * GPTS[size].parameters / 1e6:,.0f}"}
        rows.append(row | dict(zip(titles, cells, strict=True)))
    text = f"""\
# What a checkpoint costs

Milliseconds, medians: ours (safetensors, SHA-256, renamed), torch.save, plain safetensors.\
 {machine()}

{table(rows)}

{made_by()}
"""
    publish(options, "checkpoints", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
