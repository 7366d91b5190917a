"""Peak memory of training as PyTorch's own trackers have it: fake tensors and ranks, no GPU.

    python benchmarks/memory_oracle.py                  # 15 minutes on two cores
    python benchmarks/memory_oracle.py --only zero1     # rows with this input; the rest stays
    python benchmarks/memory_oracle.py --row 7 --alive  # one row, and what is alive at its peak
    python benchmarks/memory_oracle.py --quick          # two rows; keeps nothing

Writes memory_oracle.csv: a row for each setting, with its inputs, the peak in bytes, the tracker's
kinds at the peak, its moment, and the peak of each phase. Each row is measured in a process of its
own. Not counted, as no tracker sees it: workspaces of cuBLAS and NCCL, what a kernel allocates
inside (flash attention's gradient of the queries in fp32), the CUDA context, and fragments.
"""

import argparse
import csv
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from oracle_models import Shape
from oracle_training import Alive, Setting, measure
from reports import folder, made_by, parser, table

NAME = "memory_oracle.csv"
QUICK = ("vit", "gpt2")
"""Families whose first rows a quick run measures."""

LLAMA_1B = Shape("llama", 2048, 32, 8, 8192, 16, 128256, 4096)
"""Llama 3.2 1B. The models below have fewer layers than their namesakes: all layers are alike."""
LLAMA_8B = Shape("llama", 4096, 32, 8, 14336, 8, 128256, 4096)
LLAMA_70B = Shape("llama", 8192, 64, 8, 28672, 4, 128256, 8192)
GPT2_XL = Shape("gpt2", 1600, 25, 25, 6400, 12, 50257, 1024)
VIT_L = Shape("vit", 1024, 16, 16, 4096, 24, 1000, 196)
ALL = ("none", "selective", "full")
ENDS = ("none", "full")
SYNC = ("each", "last")
RULES = ("adamw_fused", "adamw_foreach", "sgd", "sgd_momentum", "adamw_8bit")


def grid(base: Setting, **axes: Sequence[Any]) -> Iterator[Setting]:
    """`base` with each combination of values; shape_NAME is a field of its shape."""
    for values in product(*axes.values()):
        changes = dict(zip(axes, values, strict=True))
        inner = {k.removeprefix("shape_"): changes.pop(k) for k in list(changes) if "shape_" in k}
        yield replace(base, shape=replace(base.shape, **inner), **changes)


def _fsdp() -> Iterator[Setting]:
    """FSDP2 of Llamas: `wide` has its peak at the loss, `small` in a layer's backward pass."""
    wide = Setting(LLAMA_8B, "fsdp2", ranks=64, samples=2)
    small = Setting(replace(LLAMA_8B, vocabulary=32000), "fsdp2", ranks=8, samples=1)
    titan = replace(wide, units="torchtitan")
    yield from grid(wide, ranks=(8, 512), recompute=ALL)
    yield from grid(wide, samples=(1, 8), recompute=ENDS)
    yield from grid(wide, loss=("in_place", "chunked"), recompute=ALL, samples=(4,))
    yield from grid(wide, reshard=(False,), recompute=ENDS)
    yield from grid(small, ranks=(8, 64, 256), recompute=ALL)
    yield from grid(small, reshard=(False,), loss=("in_place",), recompute=ALL)
    yield from grid(small, shape_tokens=(2048,), samples=(4, 8))
    yield from grid(small, shape_norm=("eager",), recompute=ENDS)
    yield from grid(small, shape_gqa=("native",), recompute=ALL)
    yield from grid(titan, recompute=ALL, ranks=(8,))
    yield from grid(titan, recompute=ALL, loss=("in_place",))
    yield from grid(titan, reshard=(False,), loss=("eager", "in_place"))
    small_titan = replace(small, units="torchtitan", loss="in_place")
    yield from grid(small_titan, micro_steps=(4,), gradient_sync=SYNC, recompute=ENDS)
    yield from grid(wide, micro_steps=(2,), gradient_sync=SYNC, ranks=(32,))
    yield from grid(small, micro_steps=(2, 4), gradient_sync=SYNC, recompute=("full",))
    yield from grid(small, optimizer=RULES, shape_tokens=(512,), shape_layers=(16,))
    yield from grid(replace(wide, shape=LLAMA_1B), samples=(4,), recompute=ALL, ranks=(16,))
    yield from grid(replace(wide, shape=LLAMA_70B), samples=(1,), recompute=ALL, ranks=(256,))


def _encoders() -> Iterator[Setting]:
    """FSDP2 of networks with biases, and HSDP."""
    gpt2 = Setting(GPT2_XL, "fsdp2", ranks=32, samples=8)
    vit = Setting(VIT_L, "fsdp2", ranks=16, samples=64)
    yield from grid(gpt2, recompute=ALL)
    yield from grid(gpt2, loss=("in_place", "chunked"), recompute=ENDS)
    yield from grid(gpt2, reshard=(False,), samples=(2, 8))
    deep = replace(gpt2, shape=replace(GPT2_XL, layers=48, tokens=256), ranks=8, samples=1)
    yield from grid(deep, optimizer=RULES, recompute=("full",), loss=("in_place",))
    yield from grid(vit, recompute=ALL)
    yield from grid(vit, micro_steps=(2,), gradient_sync=SYNC, samples=(32,))
    yield from grid(vit, shape_width=(1280,), shape_layers=(32,), shape_mlp=(5120,), samples=(8,))
    llama = Setting(LLAMA_8B, "hsdp", ranks=64, samples=2, shard=8)
    small = replace(llama, shape=replace(LLAMA_8B, vocabulary=32000), samples=1)
    yield from grid(small, recompute=ALL)
    yield from grid(llama, ranks=(512,), shard=(64,), recompute=ENDS)
    yield from grid(small, ranks=(16,), micro_steps=(4,), gradient_sync=SYNC, recompute=ENDS)
    yield from grid(llama, ranks=(16,), reshard=(False,), units=("torchtitan",))
    yield from grid(replace(gpt2, strategy="hsdp", shard=16), recompute=ENDS, loss=("in_place",))


def _replicas() -> Iterator[Setting]:
    """DDP and ZeRO-1."""
    llama = Setting(LLAMA_1B, "ddp", ranks=8, samples=1)
    gpt2 = Setting(GPT2_XL, "ddp", ranks=64, samples=8)
    vit = Setting(VIT_L, "ddp", ranks=16, samples=64)
    yield from grid(llama, recompute=ALL)
    yield from grid(llama, recompute=ENDS, bucket_view=(True,), loss=("in_place",))
    yield from grid(llama, samples=(4, 8), loss=("in_place",))
    yield from grid(llama, micro_steps=(2,), gradient_sync=SYNC, bucket_view=(False, True))
    yield from grid(llama, shape_tokens=(512,), loss=("in_place",), bucket_view=(False, True))
    yield from grid(gpt2, optimizer=RULES, samples=(1,))
    yield from grid(gpt2, recompute=ENDS, bucket_view=(True,))
    yield from grid(gpt2, recompute=ENDS, bucket_view=(True,), micro_steps=(4,), gradient_sync=SYNC)
    yield from grid(vit, recompute=ALL)
    zero = replace(llama, strategy="zero1")
    yield from grid(zero, recompute=ALL)
    yield from grid(zero, ranks=(128,), loss=("in_place",), recompute=ENDS)
    yield from grid(zero, bucket_view=(True,), loss=("in_place",))
    yield from grid(zero, micro_steps=(4,), gradient_sync=SYNC, loss=("in_place",))
    yield from grid(zero, optimizer=("adamw_foreach",), shape_tokens=(512,), loss=("in_place",))
    yield from grid(replace(gpt2, strategy="zero1"), recompute=ALL)


def _tensors() -> Iterator[Setting]:
    """Tensor parallelism, alone and inside FSDP2."""
    base = Setting(LLAMA_8B, "tp", ranks=8, samples=2, tp=8)
    rows = replace(base, sequence_parallel=True, loss_parallel=True)
    short = replace(rows, shape=replace(LLAMA_8B, vocabulary=32000, tokens=1024), samples=1)
    yield from grid(base, recompute=ALL)
    yield from grid(rows, recompute=ALL)
    yield from grid(base, loss_parallel=(True,), samples=(1, 4))
    yield from grid(rows, loss_parallel=(False,), samples=(1,))
    yield from grid(short, optimizer=("adamw_fused", "adamw_foreach"), recompute=ENDS)
    yield from grid(rows, micro_steps=(2,), optimizer=("adamw_foreach",))
    both = replace(rows, strategy="fsdp2+tp", ranks=64)
    short = replace(short, strategy="fsdp2+tp", ranks=64)
    yield from grid(both, recompute=ALL)
    yield from grid(both, units=("torchtitan",), recompute=ALL)
    yield from grid(both, units=("torchtitan",), reshard=(False,), samples=(1, 4))
    yield from grid(both, sequence_parallel=(False,), tp=(2, 4), ranks=(32,))
    yield from grid(short, recompute=ALL, tp=(2, 8))
    yield from grid(short, micro_steps=(2,), gradient_sync=SYNC, ranks=(512,))


def settings() -> list[Setting]:
    """All of them, in the order of the table."""
    return [*_fsdp(), *_encoders(), *_replicas(), *_tensors()]


def inputs(setting: Setting) -> dict[str, Any]:
    """The columns that say what was run."""
    columns = asdict(setting)
    shape: dict[str, Any] = columns.pop("shape")
    return shape | columns


def measured(number: int) -> dict[str, Any]:
    """What a row says beside its inputs."""
    return measure(settings()[number])[0]


def row(number: int, setting: Setting, found: Mapping[str, Any]) -> dict[str, Any]:
    """All columns of a setting."""
    return {"row": number} | inputs(setting) | dict(found) | {"torch": torch.__version__}


def run(numbers: Sequence[int], every: Sequence[Setting], jobs: int) -> Iterator[dict[str, Any]]:
    """Rows as they are measured, with a line of progress for each."""
    # A process for each row: all have a group of their own. Forks have torch already.
    with get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
        for done, found in enumerate(pool.imap(measured, numbers, chunksize=1), 1):
            number = numbers[done - 1]
            setting = every[number]
            print(
                f"{done} of {len(numbers)}: row {number}, {setting.shape.family}"
                f" {setting.strategy}, {setting.recompute}:"
                f" {found['peak_bytes'] / 2**30:.2f} GiB, {found['moment']}",
                file=sys.stderr,
                flush=True,
            )
            yield row(number, setting, found)


def print_alive(alive: Sequence[Alive]) -> None:
    """What is there at the peak, the largest first: GiB, how many, MiB of one, kind and origin."""
    count = Counter(alive)
    for (size, kind, origin), times in sorted(count.items(), key=lambda x: -x[0][0] * x[1]):
        if size * times >= 1 << 20:
            print(
                f"{size * times / 2**30:8.3f} = {times:3} x {size / 2**20:9.3f}  {kind}: {origin}"
            )


def _kept(path: Path, every: Sequence[Setting]) -> dict[int, dict[str, Any]]:
    """Rows of an earlier run with this torch that are still in the list, by their number."""
    if not path.exists():
        return {}
    numbers = {tuple(map(str, inputs(one).values())): n for n, one in enumerate(every)}
    found = {}
    with path.open(newline="") as file:
        for old in csv.DictReader(file):
            number = numbers.get(tuple(old[name] for name in inputs(every[0])))
            if number is not None and old["torch"] == torch.__version__:
                found[number] = {**old, "row": number}
    return found


def _options() -> argparse.Namespace:
    command = parser(__doc__, "two rows")
    command.add_argument("--row", type=int, help="one row, in this process: its JSON")
    command.add_argument("--alive", action="store_true", help="with --row: what is alive")
    command.add_argument("--only", help="rows with this among their inputs")
    command.add_argument("--jobs", type=int, default=2, choices=range(1, 65), metavar="1-64")
    options = command.parse_args()
    if options.row is not None and not 0 <= options.row < len(settings()):
        command.error(f"--row {options.row}: there are rows 0 to {len(settings()) - 1}")
    if options.only and not _chosen(options.only):
        command.error(f"--only {options.only}: no row has this among its inputs")
    return options


def _chosen(text: str) -> list[int]:
    """Numbers of the rows with an input of this text."""
    return [n for n, one in enumerate(settings()) if text in map(str, inputs(one).values())]


def _write(path: Path, rows: Mapping[int, Mapping[str, Any]]) -> None:
    ordered = [rows[number] for number in sorted(rows)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ordered[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(ordered)


def main() -> None:
    """Measure one row, or all, and write the table."""
    options = _options()
    every = settings()
    if options.row is not None:
        found, alive = measure(every[options.row], detailed=options.alive)
        print_alive(alive)
        print(json.dumps(found))
        return
    numbers = list(range(len(every)))
    if options.quick:
        numbers = [next(n for n in numbers if every[n].shape.family == name) for name in QUICK]
    elif options.only:
        numbers = _chosen(options.only)
    with folder(options) as out:
        rows = {} if options.quick else _kept(out / NAME, every)
        for found in run(numbers, every, options.jobs):
            rows[found["row"]] = found
            _write(out / NAME, rows)
    shown = ("family", "strategy", "recompute", "ranks", "peak_bytes", "moment")
    print(table([{name: str(rows[number][name]) for name in shown} for number in numbers]))
    print(f"\n{made_by()}")


if __name__ == "__main__":
    main()
