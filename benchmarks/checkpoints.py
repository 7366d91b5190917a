"""What a checkpoint costs: to write and to read, as a ratio to the old format.

    python benchmarks/checkpoints.py            # two minutes on two cores
    python benchmarks/checkpoints.py --quick    # seconds, too few to mean anything

Every rank holds what it trains by CO2: a GPT, the state of AdamW, and three vectors of the outer
step. Old and new are written and read in turn, in one run; which is first changes. The ratio is
that of each pair; the table has their median and quartiles. Reading finds the files in memory, both
times. Writing ends on the disk, both times. Writes checkpoints.md.
"""

import io
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
import torch.distributed as dist
from reports import folder, machine, made_by, parser, table
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

from co2sim.schedule import Layout
from realrun.execute.world import World
from realrun.train import checkpoint
from realrun.train.folder import CHECKPOINTS, IDENTITY, checkpoint_name, identity_text
from realrun.train.gpt import GPT
from realrun.train.pickled import read_pickled
from realrun.train.shapes import GPTS

IDENTITY_OF = {"strategy": "co2(tau=12)"}
LIMIT = 1.3
"""What the new format may cost, as a multiple of the old."""


def write_pickled(place: Path, state: Mapping[str, Any], rank: int, ranks: int) -> None:
    """A checkpoint of the old format, as it was written before there were manifests."""
    draft = place.with_name(f".{place.name}")
    named: dict[str, Tensor] = {}
    out = io.BytesIO()
    torch.save(_names(state, "", named), out)
    named["rest"] = torch.frombuffer(bytearray(out.getvalue()), dtype=torch.uint8)
    if rank == 0:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        (draft / IDENTITY).write_text(identity_text(IDENTITY_OF, ranks))
    together = dist.is_initialized()
    if together:
        dist.barrier()
    mine = {f"rank{rank}.{name}": tensor for name, tensor in named.items()}
    write_tensors(mine, checkpoint_id=draft, no_dist=not together)
    if rank == 0:
        shutil.rmtree(place, ignore_errors=True)
        draft.rename(place)
    if together:
        dist.barrier()


def _names(value: Any, name: str, named: dict[str, Tensor]) -> Any:
    """The value with names in place of its tensors, which go into `named`."""
    if isinstance(value, Tensor):
        named[name] = value.detach()
        return f"tensor:{name}"
    if isinstance(value, Mapping):
        return {key: _names(one, f"{name}/{key}", named) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_names(one, f"{name}/{at}", named) for at, one in enumerate(value))
    return value


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
    method = {"model": held, "optimizer": optimizer.state_dict(), "outer": vectors}
    return {"method": method, "step": 1, "seconds": 0.5, "losses": [4.5]}


def measure(rank: int, ranks: int, size: str, times: int, place: str) -> None:
    """Be a rank; rank 0 writes the seconds of every pair."""
    out = Path(place)
    store = dist.FileStore(str(out / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    world = World(rank, Layout(1, ranks), "gloo", torch.device("cpu"), 60.0, None, None)  # type: ignore[arg-type]
    state = state_of(size)
    old, new = out / "old" / checkpoint_name(1), out / "new"
    found: dict[str, list[float]] = {}
    work: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "write": (
            lambda: write_pickled(old, state, rank, ranks),
            lambda: checkpoint.save(new, 1, state, IDENTITY_OF, world),
        ),
        "read": (
            lambda: read_pickled(old, rank),
            lambda: checkpoint.load(new / CHECKPOINTS / checkpoint_name(1), IDENTITY_OF, world),
        ),
    }
    for number in range(times):
        for name, pair in work.items():
            order = ("old", "new") if number % 2 else ("new", "old")
            for which in order:
                seconds = timed(pair[which == "new"])
                if number:  # the first is slow
                    found.setdefault(f"{which} {name}", []).append(seconds)
    if rank == 0:
        (out / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def timed(work: Callable[[], Any]) -> float:
    """Seconds until all ranks have done it."""
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def spread(values: list[float], form: Callable[[float], str]) -> str:
    """The median, and the quartiles in brackets."""
    low, middle, high = quantiles(values, n=4)
    return f"{form(middle)} ({form(low)} to {form(high)})"


def measured(size: str, ranks: int, times: int) -> dict[str, list[float]]:
    """Seconds by what was done."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as place:
        arguments = partial(context.Process, target=measure)
        processes = [arguments(args=(rank, ranks, size, times, place)) for rank in range(ranks)]
        for one in processes:
            one.start()
        for one in processes:
            one.join()
        found: dict[str, list[float]] = json.loads((Path(place) / "found.json").read_text())
    return found


def main() -> int:
    """Measure and write."""
    command = parser(__doc__, "the smallest model, a few times")
    command.add_argument("--sizes", default="mini,small,large")
    command.add_argument("--times", type=int, default=21)
    given = command.parse_args()
    sizes, times = ("tiny", 4) if given.quick else (given.sizes, given.times)
    rows = []
    for size in sizes.split(","):
        for ranks in (1, 2):
            found = measured(size, ranks, times)
            row = {"GPT": size, "MB a rank": f"{6 * 4 * GPTS[size].parameters / 1e6:,.0f}"}
            row["ranks"] = str(ranks)
            for name in ("write", "read"):
                old, new = found[f"old {name}"], found[f"new {name}"]
                ratios = [b / a for a, b in zip(old, new, strict=True)]
                row[f"{name}: old ms"] = spread(old, lambda seconds: f"{seconds * 1e3:,.0f}")
                row["new ms" if name == "write" else "new ms "] = spread(
                    new, lambda seconds: f"{seconds * 1e3:,.0f}"
                )
                row["ratio" if name == "write" else "ratio "] = spread(ratios, "{:.2f}".format)
            rows.append(row)
            print(*row.values(), file=sys.stderr)
    text = f"""\
# What a checkpoint with checksums costs

Old: written by torch.distributed.checkpoint, read with `--trust`. New: safetensors, JSON, and a\
 manifest with the SHA-256 of every file. Medians of {times - 1} in turn, quartiles in brackets;\
 the ratio should be at most {LIMIT}. {machine()}

{table(rows)}

{made_by()}
"""
    with folder(given) as out:
        (out / "checkpoints.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
