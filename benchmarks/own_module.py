"""A step of a user's own module on two local ranks: predicted, executed, and trained by PyTorch.

    python benchmarks/own_module.py            # two minutes on two cores
    python benchmarks/own_module.py --quick    # a short probe, one step: too few to mean anything

`realrun probe` writes a cluster file of this machine, of which co2sim predicts a step of the module
that examples/own_model.py builds. `realrun run` executes the schedule, with kernels of the size of
each operation; and PyTorch trains the module itself. Medians of steps; writes own_module.md.
"""

# mypy: allow-untyped-calls

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from reports import machine, made_by, parser, publish, table
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import co2sim
from co2sim.tracing.from_torch import load_build
from realrun.launch.launcher import run_local

MODEL = f"{Path(__file__).parents[1] / 'examples' / 'own_model.py'}:small"
RANKS, SAMPLES, WARM_UP = 2, 4, 2
STRATEGIES = ("ddp", "fsdp:clip=false")
SHORT_PROBE = ("--budget", "1 s", "--max-size", "256 KiB")


# --- PyTorch, on a rank ---------------------------------------------------------------------------


def by_ddp(net: nn.Module) -> nn.Module:
    """Gradients are averaged in buckets."""
    return DistributedDataParallel(net)


def by_fsdp(net: nn.Module) -> nn.Module:
    """Every layer is divided by itself."""
    layers = next(part for part in net.children() if isinstance(part, nn.Sequential))
    for layer in layers:
        fully_shard(layer)
    fully_shard(net)
    return net


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = dict(
    zip(STRATEGIES, (by_ddp, by_fsdp), strict=True)
)


def train(strategy: str, steps: int, out: Path) -> None:
    """Time steps as one rank; rank 0 writes the times of the slowest rank of each step."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    source = load_build(MODEL)
    assert source.loss is not None
    model = WRAPPED[strategy](source.build())
    optimizer = torch.optim.AdamW(model.parameters())
    seconds = []
    for _ in range(WARM_UP + steps):
        batch = source.batch()
        dist.barrier()
        start = time.perf_counter()
        source.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(seconds[WARM_UP:])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(slowest.tolist()))
    dist.destroy_process_group()


def shares() -> str:
    """What kinds of kernels take of a step of one process without communication."""
    torch.set_num_threads(1)
    source = load_build(MODEL)
    assert source.loss is not None
    model = source.build()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(WARM_UP + 1):
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            source.loss(model, source.batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
    kernels = Counter[str]()
    for event in seen.key_averages():
        kind = next((kind for part, kind in KINDS.items() if part in event.key), "other kernels")
        kernels[kind] += event.self_cpu_time_total
    parts = kernels.most_common()
    return ", ".join(f"{kind} {time / kernels.total():.0%}" for kind, time in parts)


KINDS = {"mm": "products", "attention": "attention", "conv": "convolutions"}
"""By parts of the names of operations of PyTorch."""


# --- all three ------------------------------------------------------------------------------------


def local(*words: str) -> None:
    """Run a program as ranks of this machine; it must succeed."""
    code = run_local([sys.executable, *words], RANKS)
    assert code == 0, words


def realrun(*words: str) -> None:
    """A command of realrun, as the ranks of this machine."""
    local("-m", "realrun", *words)


def compared(strategy: str, cluster: Path, rounds: int, folder: Path) -> dict[str, str]:
    """A row of the table."""
    batch: dict[str, Any] = {"micro_batch": SAMPLES, "accumulation": 1, "recompute": "none"}
    predicted = co2sim.simulate(str(cluster), MODEL, strategy, gpus=RANKS, **batch)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in batch.items()]
    out = folder / strategy.partition(":")[0]
    where = ("--cluster", str(cluster), "--out", str(out), "--rounds", str(rounds))
    realrun("run", "--model", MODEL, "--strategy", strategy, *where, *words)
    (run,) = out.glob("*/run.json")
    executed = json.loads(run.read_text())["figures"]["step_time_s"]
    times = folder / "times.json"
    local(__file__, "--as-rank", strategy, str(rounds), str(times))
    trained = json.loads(times.read_text())
    return {
        "strategy": strategy,
        "predicted ms": f"{predicted.step_time_s * 1e3:,.0f}",
        "realrun ms": f"{executed * 1e3:,.0f}",
        "PyTorch ms": f"{median(trained) * 1e3:,.0f}",
        "range": f"{min(trained) * 1e3:,.0f} to {max(trained) * 1e3:,.0f}",
        "predicted / realrun": f"{predicted.step_time_s / executed:.2f}",
        "predicted / PyTorch": f"{predicted.step_time_s / median(trained):.2f}",
    }


def seconds_of_a_command() -> float:
    """Wall time of `co2sim run` of the large module of the file, in a process of its own."""
    model = MODEL.replace(":small", ":build")
    words = ("run", "--model", model, "--cluster", "dgx-h100", "--strategy", "fsdp", "-g", "64")
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "co2sim", *words], check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> int:
    """Probe, predict, run, train, and write the table."""
    made = parser(__doc__, "a short probe, one step")
    made.add_argument("--as-rank", nargs=3, metavar=("STRATEGY", "STEPS", "FILE"))
    options = made.parse_args()
    if options.as_rank:
        strategy, steps, out = options.as_rank
        train(strategy, int(steps), Path(out))
        return 0
    rounds = 1 if options.quick else 8
    with TemporaryDirectory() as name:
        cluster = Path(name) / "here.toml"
        realrun("probe", "--out", str(cluster), *(SHORT_PROBE if options.quick else ()))
        rows = [compared(strategy, cluster, rounds, Path(name)) for strategy in STRATEGIES]
    load = os.getloadavg()[0]
    text = (
        "# A step of a user's own module on two local ranks\n\n"
        f"`examples/own_model.py:small`, {SAMPLES} samples a rank and step, fp32, AdamW, one thread"
        f" a rank, Gloo. *realrun* executes the schedule with products and copies of the size of"
        f" each operation; *PyTorch* trains the module. Medians of {rounds} steps, with a load"
        f" of {load:.1f} (the ranks are 2 of it). {machine()}\n\n"
        f"{table(rows)}\n\n"
        f"Of a step of PyTorch in one process: {shares()}. The prediction times a"
        " pass by its FLOP and the speed of probed products, or by its bytes, whichever takes"
        " longer; on a processor a pass takes both, since no kernel runs beside another.\n\n"
        f"`co2sim run` of `examples/own_model.py:build` on 64 GPUs took"
        f" {seconds_of_a_command():.1f} s, with the start of Python and PyTorch.\n\n{made_by()}\n"
    )
    publish(options, "own_module", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
