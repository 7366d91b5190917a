"""Beside the peers, in one run of the lab: tokens per second and the last loss of each.

    sudo python benchmarks/peers.py                        # some minutes
    sudo python benchmarks/peers.py --rate "1000 Mbit/s" --steps 480
    sudo python benchmarks/peers.py --quick                # one of them, a few steps

torch DDP, torch's post-local SGD, LocalSGD and DiLoCo of torchft, and our LocalSGD, DiLoCo,
Streaming DiLoCo and CO2, as published and with a delay, train the same GPT from the same weights on
the same samples with the same AdamW: a local step is the same code for all. Settings are equal
where the algorithms are; none is tuned. torchft comes with pip install '.[peers]'; what is not
installed, or fails, is said in the table.

They take turns, since the speed of machines changes: tokens per second are the median of three
turns. Each runs for a short time first, so that nothing is measured that happens only once. Seconds
are rank 0's between two barriers. The loss is the validation loss of the mean of the workers.
Writes peers.csv and peers.md.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from reports import folder, installed, machine, made_by, parser, table
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from realrun.algorithms import CO2, DiLoCo, LocalSGD
from realrun.errors import TrainingError
from realrun.execute.world import World, join
from realrun.train.tasks.presets import GPTS
from realrun.train.tasks.task import Task, loss_of, scores
from realrun.train.tasks.text import text

NODES = 4
TAU = 12
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.5
FRAGMENTS = 3


@dataclass(frozen=True, slots=True)
class Attached:
    """What a step calls: a model, and an optimizer."""

    model: nn.Module
    optimizer: Any


Attach = Callable[[nn.Module, Optimizer, World], contextlib.AbstractContextManager[Attached]]


@contextmanager
def torch_ddp(model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[Attached]:
    """DistributedDataParallel."""
    del world
    yield Attached(DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer)


@contextmanager
def torch_post_local(
    model: nn.Module, optimizer: Optimizer, world: World, *, tau: int = TAU
) -> Iterator[Attached]:
    """PostLocalSGDOptimizer: no gradient is reduced from the first step on, models are averaged."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    alone, _ = dist.new_subgroups(1)
    state = PostLocalSGDState(None, alone, 0, post_local_gradient_allreduce=False)
    wrapped.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=tau)
    averager.step = 1  # it would average after the first step, else after every tau steps
    del world
    yield Attached(wrapped, PostLocalSGDOptimizer(optim=optimizer, averager=averager))


def ours(kind: Callable[..., contextlib.AbstractContextManager[Any]], **options: Any) -> Attach:
    """An algorithm of `realrun`."""

    @contextmanager
    def attach(model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[Attached]:
        with kind(model, optimizer, tau=TAU, timeout=world.deadline, **options):
            yield Attached(model, optimizer)

    return attach


@contextmanager
def _manager(model: nn.Module, world: World) -> Iterator[Any]:
    """A Manager of torchft: every rank is a replica, rank 0 hosts the lighthouse.

    Replicas tell each other their host's name; nodes of the lab have only addresses.
    """
    host, size = _own_address(), world.layout.world_size
    socket.gethostname = lambda: host
    from torchft import Manager, ProcessGroupGloo  # noqa: PLC0415 - may be missing
    from torchft._torchft import LighthouseServer  # noqa: PLC0415 - as above

    shared: list[Any] = [None]
    lighthouse = None
    if world.rank == 0:
        lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=size, join_timeout_ms=1000)
        port = lighthouse.address().rpartition(":")[2]
        shared = [f"http://{host}:{port}"]
    dist.broadcast_object_list(shared)
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    limit = timedelta(seconds=world.deadline)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        min_replica_size=size,
        init_sync=False,  # weights are equal; else the first round of all but one is lost
        use_async_quorum=False,
        timeout=limit,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=shared[0],
        replica_id=f"rank{world.rank}_",
        hostname=host,
    )
    try:
        yield manager
        dist.barrier()
    finally:
        manager.shutdown(wait=False)
        if lighthouse:
            lighthouse.shutdown()


@contextmanager
def _silent() -> Iterator[None]:
    """Without stderr: torchft tells every quorum there, and cannot be asked not to."""
    kept = os.dup(2)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _own_address() -> str:
    """The address of this node, as the others see it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        return str(probe.getsockname()[0])


@contextmanager
def torchft_local(
    model: nn.Module, optimizer: Optimizer, world: World, *, tau: int = TAU
) -> Iterator[Attached]:
    """LocalSGD of torchft."""
    from torchft.local_sgd import LocalSGD as Theirs  # noqa: PLC0415 - may be missing

    with (
        _silent(),
        _manager(model, world) as manager,
        Theirs(manager, model, optimizer, sync_every=tau),
    ):
        yield Attached(model, optimizer)


@contextmanager
def torchft_diloco(
    model: nn.Module,
    optimizer: Optimizer,
    world: World,
    *,
    tau: int = TAU,
    outer_lr: float = OUTER_LR,
    outer_momentum: float = OUTER_MOMENTUM,
    bucketed: bool = False,
) -> Iterator[Attached]:
    """DiLoCo of torchft, the whole model as one fragment.

    It averages every tensor by itself unless it is `bucketed`.
    """
    from torchft.local_sgd import DiLoCo as Theirs  # noqa: PLC0415 - may be missing

    outer = torch.optim.SGD(
        model.parameters(), lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0
    )
    with (
        _silent(),
        _manager(model, world) as manager,
        Theirs(
            manager,
            [model],
            optimizer,
            outer,
            sync_every=tau,
            pin_memory=False,
            use_bucketization=bucketed,
        ),
    ):
        yield Attached(model, optimizer)


SIZE = "mini"
BATCH = 32
LR = 5e-3
TURNS = 3
WARM_UP = 2 * TAU

_STEP = {"outer_lr": OUTER_LR, "outer_momentum": OUTER_MOMENTUM}
LATE = "our CO2, delay auto"
PEERS: dict[str, Attach] = {
    "torch DDP": torch_ddp,
    "torch post-local SGD": torch_post_local,
    "our LocalSGD": ours(LocalSGD),
    "our DiLoCo": ours(DiLoCo, **_STEP),
    "our Streaming DiLoCo": ours(DiLoCo, **_STEP, fragments=FRAGMENTS, delay="auto"),
    "our CO2": ours(CO2.published),
    LATE: ours(CO2, delay="auto"),
    "torchft LocalSGD": torchft_local,
    "torchft DiLoCo": torchft_diloco,
}


def measured(attach: Attach, task: Task, world: World, steps: int) -> tuple[float, float]:
    """Seconds for `steps` steps, and the last validation loss. All ranks call this."""
    torch.manual_seed(0)
    model = task.model()
    optimizer = AdamW(model.parameters(), lr=LR)
    with attach(model, optimizer, world) as setup:
        dist.barrier()
        began = time.monotonic()
        for step in range(1, steps + 1):
            batch = task.batch(0, step, BATCH, world.rank, world.layout.world_size)
            setup.optimizer.zero_grad()
            loss = loss_of(setup.model, batch)
            loss.backward()
            setup.optimizer.step()
        seconds = time.monotonic() - began
        if not torch.isfinite(loss):
            raise TrainingError(f"the last loss is {loss.item()}")
        dist.barrier()
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter)
            parameter.div_(world.layout.world_size)
        total, _, count = sum(scores(model, batch) for batch in task.validation)
    return seconds, float(total / count)


def run_rank(steps: int, turns: int, names: Mapping[str, Attach], out: Path) -> None:
    """Be one of the ranks: measure all that are installed."""
    world = join("gloo", 60.0)
    task = text(GPTS[SIZE], world.device)
    found: dict[str, dict[str, Any]] = {}
    for turn in range(turns):
        for name, attach in names.items():
            row = found.setdefault(name, {"name": name, "rates": [], "loss": None, "note": ""})
            if name.startswith("torchft") and find_spec("torchft") is None:
                row["note"] = "not installed"
                continue
            try:
                if not turn:
                    measured(attach, task, world, WARM_UP)
                seconds, row["loss"] = measured(attach, task, world, steps)
                row["rates"].append(steps * BATCH * task.units / seconds)
            except Exception as error:  # noqa: BLE001 - whatever it is, the table says so
                words = " ".join(str(error).split())[:150]
                row["note"] = f"failed: {type(error).__name__}: {words}"
            if world.rank == 0:
                print(row, file=sys.stderr, flush=True)
                _write(list(found.values()), out)
            if row["note"].startswith("failed"):
                os._exit(0)  # ranks may not agree on where they are: no more can be measured
    world.leave()


def _write(rows: list[dict[str, Any]], out: Path) -> None:
    """Medians, and the slowest and the fastest turn."""
    lines = [
        {
            "name": row["name"],
            "tokens_per_s": median(row["rates"]) if row["rates"] else None,
            "slowest": min(row["rates"], default=None),
            "fastest": max(row["rates"], default=None),
            "loss": row["loss"],
            "note": row["note"],
        }
        for row in rows
    ]
    pd.DataFrame(lines).to_csv(out / "peers.csv", index=False)


def report(frame: pd.DataFrame, rate: str, steps: int, nodes: int) -> str:
    """The table in Markdown."""
    rows = [
        {
            "algorithm": r["name"],
            "tokens/s": "-" if pd.isna(r["loss"]) else f"{r['tokens_per_s']:,.0f}",
            "turns": "-" if pd.isna(r["loss"]) else f"{r['slowest']:,.0f} to {r['fastest']:,.0f}",
            "validation loss": "-" if pd.isna(r["loss"]) else f"{r['loss']:.4f}",
            "note": r["note"],
        }
        for _, r in frame.iterrows()
    ]
    return f"""\
# Beside the peers

{nodes} nodes at {rate}, a GPT of {GPTS[SIZE].parameters:,} parameters, {steps} steps of {BATCH} x\
 {GPTS[SIZE].context} characters, AdamW at {LR:g}, tau {TAU}; outer lr {OUTER_LR:g} and momentum\
 {OUTER_MOMENTUM:g} (CO2: its defaults, 1 and 0, as published 0.5 and 0). torchft-nightly:\
 {installed("torchft-nightly")}. {machine()}

{table(rows)}

{made_by()}
"""


def main() -> None:
    """Start the lab, or be one of its ranks."""
    command = parser(__doc__, "our CO2 only, on two nodes, 24 steps")
    command.add_argument("--rate", default="100 Mbit/s")
    command.add_argument("--steps", type=int, default=480)
    command.add_argument("--only", default="", help="words in the names of peers, commas between")
    given = command.parse_args()
    steps, turns, nodes, names = given.steps, TURNS, NODES, PEERS
    if given.only:
        wanted = given.only.split(",")
        names = {name: one for name, one in PEERS.items() if any(word in name for word in wanted)}
    if given.quick:
        steps, turns, nodes, names = 2 * TAU, 1, 2, {LATE: PEERS[LATE]}
    with folder(given) as out:
        if "RANK" in os.environ:
            run_rank(steps, turns, names, out)
            return
        inside = [sys.executable, __file__, *sys.argv[1:], "--out", str(out)]
        lab = ["lab", "run", "--nodes", str(nodes), "--rate", given.rate, "--", *inside]
        subprocess.run([sys.executable, "-m", "realrun", *lab], check=True)
        frame = pd.read_csv(out / "peers.csv", dtype={"note": str}).fillna({"note": ""})
        words = report(frame, given.rate, steps, nodes)
        (out / "peers.md").write_text(words)
    print(words)


if __name__ == "__main__":
    main()
