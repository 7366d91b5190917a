"""What NCCL does between the GPUs of a node: averages, and training beside them.

    torchrun --nproc-per-node gpu benchmarks/gpu/several.py --out FOLDER
    torchrun --nproc-per-node 2 benchmarks/gpu/several.py --quick --out FOLDER   # CPUs, over Gloo

Rank 0 writes several.json in SI units after every section; what failed is a line of it, and the
exit code is then 1. `run_several.sh` runs the tests that need several GPUs before it.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from measure import DEVICE, GPU, Rows, attached, machine, recorded, synchronize, timed
from torch import nn

_WARM_UP = 12
"""Steps."""


def all_reduces(*, quick: bool) -> Rows:
    """Time of all-reduces by size, fp32."""
    rows: Rows = []
    for power in range(12, 17 if quick else 31, 2):
        x = torch.ones(2**power // 4, device=DEVICE)
        seconds = timed(lambda x=x: dist.all_reduce(x), repeats=10)
        rows.append({"bytes": 2**power, "ranks": dist.get_world_size(), "seconds": seconds})
    return rows


def beside(*, quick: bool) -> Rows:
    """Matrix products alone and beside an all-reduce, by the options of its communicator."""
    width, size = (64, 2**12) if quick else (8192, 2**28)
    a, x = torch.randn(width, width, device=DEVICE), torch.ones(size, device=DEVICE)
    a = a.bfloat16() if GPU else a
    rows: Rows = [{"options": "alone", "seconds": timed(lambda: a @ a)}]
    every: dict[str, Any] = {"default": None}
    if GPU:
        for name in ("4 CTAs", "low priority", "high priority"):
            options = dist.ProcessGroupNCCL.Options(name == "high priority")
            if name == "4 CTAs":
                options.config.max_ctas = 4
            every[name] = options
    for name, options in every.items():
        group = dist.new_group(pg_options=options)
        dist.all_reduce(x, group=group)

        def both(group: Any = group) -> None:
            work = dist.all_reduce(x, group=group, async_op=True)
            for _ in range(10):
                a @ a
            assert work is not None
            work.wait()

        rows.append({"options": name, "seconds": timed(both, repeats=5) / 10})
    return rows


def training(*, quick: bool) -> Rows:
    """Steps with a late average in each, and with averages that are waited for."""
    rows: Rows = []
    width, steps = (32, 12) if quick else (4096, 300)
    for name, options in (
        ("LocalSGD", {"tau": 4}),
        ("CO2.published", {"tau": 4}),
        ("CO2", {"tau": 1, "delay": 1}),
        ("CO2", {"tau": 4, "delay": 2, "fragments": 4, "dtype": "int8"}),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        x = torch.randn(512, width, device=DEVICE)
        algorithm = attached(name, model, optimizer, check_every=50, **options)
        with algorithm:
            for step in range(-_WARM_UP, steps):
                if step == 0:  # what is done for the first time takes longer
                    synchronize()
                    start = time.perf_counter()
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            synchronize()
            seconds = (time.perf_counter() - start) / steps
            stats = algorithm.stats()
        row = {"algorithm": name, "options": options, "seconds": seconds}
        rows.append({**row, "late": stats.late, "waited": stats.waited, "rounds": stats.rounds})
    return rows


SECTIONS: dict[str, Callable[..., Rows]] = {
    "all_reduces": all_reduces,
    "beside": beside,
    "training": training,
}


def main() -> int:
    """Measure section by section, on all ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of several.json")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, which mean nothing")
    options = parser.parse_args()
    if GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if GPU else "gloo")
    failed = recorded(
        SECTIONS,
        options.out / "several.json",
        {**machine(), "ranks": dist.get_world_size()},
        quick=options.quick or not GPU,
        writes=dist.get_rank() == 0,
        together=True,
    )
    if not failed:
        dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    sys.exit(main())
