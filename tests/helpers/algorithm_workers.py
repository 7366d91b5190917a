"""What ranks of the tests of the local-update family do."""

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from local_problem import algorithm_of, batch, co2_of, loss, network, optimizer, said, train, vector
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from co2sim.common.errors import Co2simError
from realrun.algorithms import LocalSGD, LocalUpdate, Workers, pacing
from realrun.algorithms.averaging import Average, PendingAverage, Stopwatch, beside_training
from realrun.algorithms.process_groups import Wire
from realrun.execute.world import World

SMALL = 1e-4
"""MiB of a bucket: the problem's 80 elements make four."""


DEADLINE = 2.0
"""Seconds that workers wait for a lost one."""


def made(case: dict[str, Any], world: World) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Model, optimizer and algorithm of a case, from a seed that only rank 0 has right."""
    model = network(getattr(torch, case.get("model", "float32")), seed=world.rank)
    model.to(case.get("device", world.device))
    optim = optimizer(model, case["inner"])
    algorithm = algorithm_of(case["algorithm"], model, optim, **case["options"])
    return model, optim, algorithm


def follow(world: World, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train by every case: what this rank holds after each round, and its stats."""
    found = []
    for case in cases:
        model, optim, algorithm = made(case, world)
        steps = partial(train, model, optim, world.rank)
        found.append(followed(case, algorithm, steps, partial(vector, model)))
    return found


def followed(
    case: dict[str, Any],
    algorithm: LocalUpdate,
    steps: Callable[[range], None],
    held: Callable[[], torch.Tensor],
) -> dict[str, Any]:
    """What is `held` after each round of a case, and the algorithm's stats."""
    tau, history, stats = case["options"]["tau"], [], []
    with algorithm:
        for t in range(case["rounds"]):
            steps(range(t * tau, (t + 1) * tau))
            history.append(held().tolist())
            stats.append(algorithm.stats())
    return {
        "history": history,
        "penalties": [each.penalty for each in stats],
        "clipped": stats[-1].clipped,
        "residual": stats[-1].clip_residual,
        "counts": [stats[-1].rounds, stats[-1].steps],
        "sent": stats[-1].bytes_sent,
    }


@contextmanager
def serial() -> Iterator[None]:
    """Every average is waited for where it is launched."""
    launch = Average.launch

    def wait_at_once(self: Average, given: torch.Tensor, number: int) -> PendingAverage:
        flight = launch(self, given, number)
        flight.wait()
        return flight

    Average.launch = wait_at_once  # type: ignore[method-assign]
    try:
        yield
    finally:
        Average.launch = launch  # type: ignore[method-assign]


def equal(world: World) -> list[str]:
    """Runs that must give the same bits; gives those that do not."""

    def run(name: str, **options: Any) -> list[list[float]]:
        rounds = options.pop("rounds", 6)
        case = {"algorithm": name, "inner": "momentum", "rounds": rounds, "options": options}
        history: list[list[float]] = follow(world, [case])[0]["history"]
        return history

    wrong = []
    for name, options in (
        ("CO2", {"staleness": 1}),
        ("CO2", {"staleness": 3, "clip": 0.02}),
        ("CO2", {"dtype": "bf16"}),
        ("CO2", {"dtype": "int8", "staleness": 2}),
        ("CO2", {"delay": 1, "keep": 0.5, "predict": 0.5}),
        ("CO2", {"dtype": "int8", "delay": 3}),
        ("CO2", {"delay": 2, "fragments": 3}),
        ("CO2", {"dtype": "bf16", "delay": 2, "keep": 0.3}),
        ("CO2", {"delay": 1, "preview": True, "outer_momentum": 0.5, "outer_lr": 0.5}),
        ("OverlapLocalSGD", {}),
    ):
        overlapped = run(name, tau=3, bucket_mib=SMALL, **options)
        with serial():
            if overlapped != run(name, tau=3, bucket_mib=SMALL, **options):
                wrong.append(f"overlapped {name} {options} is not serial")
    slow = run("SlowMo", tau=2, outer_momentum=0.7, outer_lr=0.8)
    for gap in ("gap_aware", "constant"):
        now = run("CO2", tau=2, outer_momentum=0.7, outer_lr=0.8, staleness=0, gap=gap)
        if now != slow:
            wrong.append(f"CO2 with staleness 0, {gap}, is not SlowMo")
    if run("SlowMo", tau=2, outer_momentum=0.0, outer_lr=1.0) != run("LocalSGD", tau=2):
        wrong.append("SlowMo without momentum is not LocalSGD")
    return wrong


def data_parallel(world: World) -> float:
    """Largest difference between DDP and LocalSGD with tau = 1, both with SGD, in 10 steps."""
    ours, theirs = network(), DistributedDataParallel(network())
    mine, other = optimizer(ours, "sgd"), optimizer(theirs, "sgd")
    with LocalSGD(ours, mine, tau=1):
        train(ours, mine, world.rank, range(10))
    train(theirs, other, world.rank, range(10))
    moved = (vector(ours) - vector(network())).abs().max()
    assert moved > 0.1
    return float((vector(ours) - vector(theirs)).abs().max())


def averages(world: World) -> list[list[float]]:
    """Rank r gives r + 1 everywhere, on every wire: largest error of the mean, seconds waited."""
    found = []
    for wire in get_args(Wire):
        average = Average(dist.group.WORLD, wire, 10.0, 4 * 300_000)
        given = torch.full((1_000_001,), world.rank + 1.0, device=world.device)
        flight = average.launch(given, 0)
        clock = Stopwatch(given.device)
        with beside_training(flight):
            flight.wait()
        clock.stop()
        waited = clock.seconds()
        mean = (dist.get_world_size() + 1) / 2
        found.append([float((given - mean).abs().max()), waited])
        average.close()
    return found


def ahead(world: World) -> list[list[float]]:
    """Steps whose GPU is busy for 20 ms: averages that were late, seconds waited, longest step.

    Of the host, which issues a round while the GPU works on it.
    """
    from realrun.execute.cuda_streams import hold  # noqa: PLC0415 - needs a GPU

    found = []
    for options in ({}, {"delay": 2}, {"delay": 2, "fragments": 2, "dtype": "int8"}):
        model = network().to(world.device)
        optim = optimizer(model, "sgd")
        with co2_of(model, optim, tau=4, **options) as co2:  # type: ignore[arg-type]
            wire = options.get("dtype", "fp32")
            co2._outer.average = Average(dist.group.WORLD, wire, 10.0, 2**20)  # type: ignore[arg-type]
            longest = 0.0
            for step in range(24):
                if step == 12:  # what is done for the first time takes longer
                    before = co2.stats()
                optim.zero_grad()
                loss(model, world.rank, step).backward()
                if step >= 12:
                    hold(0.02)
                start = time.perf_counter()
                optim.step()
                took = time.perf_counter() - start
                longest = max(longest, took if 12 <= step < 16 else 0.0)
            stats = co2.stats()
            found.append([stats.late - before.late, stats.waited - before.waited, longest])
    return found


def offloaded(world: World) -> list[Any]:
    """Bytes a parameter that CO2 keeps on a GPU, without and with offload, and equal models."""
    kept, models = [], []
    for offload in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(1024, 1024).cuda()
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        before = torch.cuda.memory_allocated()
        with co2_of(model, optim, tau=2, offload=offload) as co2:
            kept.append((torch.cuda.memory_allocated() - before) / 1024**2)
            for step in range(6):
                x = torch.randn(4, 1024, generator=torch.Generator().manual_seed(step + world.rank))
                optim.zero_grad()
                model(x.cuda()).square().mean().backward()
                optim.step()
            co2.finish()
        models.append(vector(model))
    return [*kept, torch.equal(*models)]


def captured(world: World) -> str:
    """What is told when a step is captured into a CUDA graph."""
    model = network().to(world.device)
    optim = torch.optim.Adam(model.parameters(), lr=0.1, capturable=True)
    algorithm = co2_of(model, optim, tau=2)
    for step in range(4):
        optim.zero_grad()
        loss(model, world.rank, step).backward()
        optim.step()

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            optim.step()

    told = said(capture)
    algorithm.close()
    return told


def stop_together(world: World) -> list[int]:
    """Steps taken where rank 1 is told to stop after 5: those of every rank."""
    model = network()
    optim = optimizer(model, "sgd")
    with co2_of(model, optim, tau=3) as co2:
        for step in range(20):
            train(model, optim, world.rank, range(step, step + 1))
            if co2.any_rank(world.rank == 1 and step == 4):
                break
        return [step + 1, co2.stats().steps]


def odd_offload(world: World) -> str:
    """What is told where one rank keeps its vectors elsewhere, and where options are not Gloo's."""
    model = network()
    optim = optimizer(model, "sgd")
    told = said(lambda: co2_of(model, optim, tau=2, offload=world.rank == 1))
    return told + said(lambda: co2_of(model, optim, tau=2, pg_options=object()))


def refused(world: World) -> dict[str, str]:
    """What ranks that differ are told when they start."""
    odd = world.rank == 1

    def start(
        model: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any
    ) -> None:
        co2_of(model, kind(model.parameters(), lr=0.1), **options)

    wider = nn.Linear(3, 4 if odd else 5)
    renamed = nn.ModuleDict({"b" if odd else "a": nn.Linear(2, 2)})
    deeper = nn.Sequential(nn.Linear(2, 2), *([nn.Linear(2, 2)] if odd else []))
    half = nn.Linear(2, 2).to(torch.bfloat16 if odd else torch.float32)
    plain = nn.Linear(2, 2)
    frozen = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 4 if odd else 3)})
    frozen["b"].requires_grad_(requires_grad=False)
    buffered = nn.Linear(2, 2)
    if odd:
        buffered.register_buffer("extra", torch.zeros(2))
    image = nn.Conv2d(3, 4, 3)
    image.to(memory_format=torch.channels_last if odd else torch.contiguous_format)

    def start_trained(model: nn.Module) -> None:
        trained = [one for one in model.parameters() if one.requires_grad]
        co2_of(model, torch.optim.SGD(trained, lr=0.1))

    return {
        "frozen": said(lambda: start_trained(frozen)),
        "buffer": said(lambda: start(buffered)),
        "order": said(lambda: start(image)),
        "shape": said(lambda: start(wider)),
        "name": said(lambda: start(renamed)),
        "more": said(lambda: start(deeper)),
        "dtype": said(lambda: start(half)),
        "optimizer": said(lambda: start(plain, torch.optim.Adam if odd else torch.optim.SGD)),
        "tau": said(lambda: start(plain, tau=3 if odd else 4)),
        "setting": said(lambda: start(plain, outer_momentum=0.1 if odd else 0.2)),
        "ddp": said(lambda: start(DistributedDataParallel(nn.Linear(2, 2)))),
    }


def loaded(world: World) -> list[str]:
    """What is told at the first step when weights were loaded by all ranks, and by one."""
    told = []
    for ranks in (range(world.layout.world_size), [1]):
        model = network()
        optim = optimizer(model, "sgd")
        algorithm = co2_of(model, optim, tau=1)
        if world.rank in ranks:
            model.load_state_dict(network(seed=5).state_dict())
        told.append(said(lambda: train(model, optim, world.rank, range(3))))  # noqa: B023 - called at once
        algorithm.close()
    return told


def not_finite(world: World, cases: list[Any]) -> list[dict[str, Any]]:
    """What happens to averages that are not finite, for several values, wires and stalenesses."""
    return [_not_finite(world, *case) for case in cases]


def _not_finite(world: World, poison: float, dtype: str, staleness: int) -> dict[str, Any]:
    """The last rank's model goes wrong in round 1; what everybody is told, and what changed."""
    model = network()
    optim = optimizer(model, "sgd")
    algorithm = co2_of(model, optim, tau=2, dtype=dtype, staleness=staleness, bucket_mib=SMALL)  # type: ignore[arg-type]
    told, before, after, again = "", [], [], ""
    state = algorithm._outer.state
    try:
        for step in range(12):
            optim.zero_grad()
            loss(model, world.rank, step).backward()
            if step == 3 and world.rank == world.layout.world_size - 1:
                with torch.no_grad():
                    model[3].weight[1, 2] = poison
            before = [vector(model), state.anchor.clone(), state.vectors["momentum"].clone()]
            if step % 2:  # what closes a round moves other parameters only
                model[0].weight.grad.zero_()
            optim.step()
    except Co2simError as error:
        told = f"{type(error).__name__}: {error}"
        after = [vector(model), state.anchor, state.vectors["momentum"]]
        optim.zero_grad()
        again = said(optim.step)
        algorithm.close()
    live = float((before[0][:35] - after[0][:35]).abs().max())
    kept = [torch.equal(one, two) for one, two in zip(before[1:], after[1:], strict=True)]
    return {
        "told": told,
        "again": again,
        "kept": kept,
        "live": live,
        "finite": bool(after[1].isfinite().all() and after[2].isfinite().all()),
        "rounds": algorithm.stats().rounds,
    }


def drifted(world: World) -> dict[str, str]:
    """Rank 2's anchor is changed by one bit; what everybody is told at the next check."""
    model = network()
    optim = optimizer(model, "sgd")

    def go_on(*, tampered: bool) -> None:
        with co2_of(model, optim, tau=1, check_every=2) as co2:
            train(model, optim, world.rank, range(4))
            if tampered and world.rank == 2:
                anchor = co2._outer.state.anchor
                anchor[7] = torch.nextafter(anchor[7], torch.tensor(9.0))
            train(model, optim, world.rank, range(4, 8))

    return {
        "plain": said(lambda: go_on(tampered=False)),
        "tampered": said(lambda: go_on(tampered=True)),
    }


def leave(world: World) -> dict[str, Any]:
    """How a block ends that is closed in the middle of a round."""
    model = network()
    optim = optimizer(model, "sgd")
    co2 = co2_of(model, optim, tau=2)
    train(model, optim, world.rank, range(3))
    under_way = len(co2._outer.flights)
    live = vector(model)
    co2.close()
    applied = not torch.equal(live, vector(model))
    steps = co2.stats().steps
    train(model, optim, world.rank, range(3, 7))
    co2.close()
    return {"under way": under_way, "applied": applied, "let go": [steps, co2.stats().steps]}


def misused(world: World) -> dict[str, str]:
    """What is told when a block is entered again, an optimizer shared, or a parameter unfrozen."""
    model = network()
    optim = optimizer(model, "sgd")
    co2 = co2_of(model, optim, tau=1)
    shared = said(lambda: co2_of(model, optim, tau=1))
    with co2:
        train(model, optim, world.rank, range(1))

    def again() -> None:
        with co2:
            train(model, optim, world.rank, range(1, 2))

    def unfrozen() -> None:
        late = network()
        late[0].weight.requires_grad_(requires_grad=False)
        every = optimizer(late, "sgd")
        with co2_of(late, every, tau=1):
            late[0].weight.requires_grad_()
            train(late, every, world.rank, range(1))

    return {
        "shared": shared,
        "again": said(again),
        "unfrozen": said(unfrozen),
    }


def resume(world: World, folder: str) -> list[str]:
    """Runs cut after some steps and resumed, against uninterrupted ones; gives what differs."""
    usual = ((1, "save"), (6, "save"), (8, "dcp"))
    each = ((4, "save"), (5, "save"), (6, "dcp"))  # phases of a round with averages under way
    both = ("momentum", "adamw")
    runs: list[tuple[str, dict[str, Any], tuple[str, ...], tuple[tuple[int, str], ...]]] = [
        ("CO2", {"staleness": 1, "clip": 0.05}, both, usual),
        ("CO2", {"staleness": 2}, both, usual),
        ("CO2", {"staleness": 1, "dtype": "int8"}, both, usual),
        ("SlowMo", {}, both, usual),
        ("OverlapLocalSGD", {}, both, usual),
        ("CO2", {"delay": 1, "dtype": "int8"}, ("momentum",), each),
        ("CO2", {"delay": 2, "fragments": 3}, ("adamw",), each),
        ("CO2", {"delay": 2, "keep": 0.5, "predict": 0.5}, ("adamw",), each),
        ("CO2", {"delay": 2, "fragments": 2, "preview": True}, ("adamw",), each),
    ]
    wrong = []
    for name, options, inners, cuts in runs:
        for inner, (cut, way) in itertools.product(inners, cuts):
            case = {
                "algorithm": name,
                "inner": inner,
                "options": {"tau": 3, **options, "bucket_mib": SMALL},
            }
            path = Path(folder) / f"{inner} {name} {options} {cut}"
            wrong += _resumed(world, case, cut, path, way)
    return wrong


def _resumed(world: World, case: dict[str, Any], cut: int, folder: Path, way: str) -> list[str]:
    model, optim, algorithm = made(case, world)
    with algorithm:
        train(model, optim, world.rank, range(cut))
        if way == "dcp":
            dcp.save({"algorithm": algorithm}, checkpoint_id=folder)
        mine = Path(f"{folder}-{world.rank}")
        torch.save([model.state_dict(), optim.state_dict(), algorithm.state_dict()], mine)
        train(model, optim, world.rank, range(cut, 16))
        stats = algorithm.stats()
    other, again, resumed = made(case, world)
    with resumed:
        weights, inner, state = torch.load(mine)
        if way == "dcp":
            dcp.load({"algorithm": resumed}, checkpoint_id=folder)
        else:
            resumed.load_state_dict(state)
        other.load_state_dict(weights)
        again.load_state_dict(inner)
        train(other, again, world.rank, range(cut, 16))
        ended = resumed.stats()
    clock = {"waited": 0.0, "late": 0, "seconds": 0.0}
    same = (
        torch.equal(vector(model), vector(other)),
        torch.equal(algorithm._outer.state.anchor, resumed._outer.state.anchor),
        replace(stats, **clock) == replace(ended, **clock),
        bool(stats.rounding_residual) == (case["options"].get("dtype") == "int8"),
    )
    return [] if all(same) else [f"{case} cut after {cut} ({way}): {same}"]


def rounding(world: World) -> list[list[float]]:
    """What quantization took off averages: |D - D'|^2, and the two numbers that the flight tells.

    Of int8 and int4 in one bucket, and in several.
    """
    found, seed = [], torch.Generator().manual_seed(world.rank)
    given = torch.randn(400_001, generator=seed) * torch.logspace(-3, 0, 400_001)
    exact = given.double()
    dist.all_reduce(exact)
    exact /= world.layout.world_size
    for wire, bucket in itertools.product(("int8", "int4"), (2**25, 2**20)):
        average = Average(dist.group.WORLD, wire, DEADLINE, bucket)
        flight = average.launch(given.clone(), 0)
        flight.wait()
        error = float(((flight.vector.double() - exact) ** 2).sum())
        found.append([error, *flight.rounding()])
        average.close()
    return found


def chosen_delay(world: World) -> dict[str, Any]:
    """Rank r sees averages r + 1 steps after their launch: the delays taken, and after resuming."""
    arrived, steady = PendingAverage.arrived, pacing._STEADY

    def seen(self: PendingAverage) -> bool:
        return self.notices is None or self.notices.steps() - self.step > world.rank

    PendingAverage.arrived = seen  # type: ignore[method-assign]
    pacing._STEADY = float("inf")  # whatever else this machine does
    try:
        model = network()
        optim = optimizer(model, "sgd")
        delays = []
        with co2_of(model, optim, tau=4, delay="auto") as co2:
            for t in range(7):
                train(model, optim, world.rank, range(4 * t, 4 * t + 4))
                delays.append(co2.stats().delay)
            state = copy.deepcopy(co2.state_dict())
        other = network()
        again = optimizer(other, "sgd")
        with co2_of(other, again, tau=4, delay="auto") as resumed:
            other.load_state_dict(model.state_dict())
            resumed.load_state_dict(state)
            train(other, again, world.rank, range(8))
            return {"delays": delays, "resumed": resumed.stats().delay}
    finally:
        PendingAverage.arrived = arrived  # type: ignore[method-assign]
        pacing._STEADY = steady


def agreed(world: World) -> list[Any]:
    """The consensus after every step of three rounds, a run that ends there, and what stays.

    Without outer momentum, and with it and a preview.
    """
    seen = []
    outer: dict[str, Any] = {"outer_momentum": 0.9, "outer_lr": 0.1, "preview": True}
    for options, steps in itertools.product(({}, outer), range(1, 10)):
        model = network()
        optim = optimizer(model, "sgd")
        with co2_of(model, optim, tau=3, delay=2, **options) as co2:
            for step in range(steps):
                train(model, optim, world.rank, range(step, step + 1))
                live = vector(model)
                with co2.consensus():
                    inside = vector(model)
                same = torch.equal(live, vector(model))
        seen.append([inside.tolist(), vector(model).tolist(), same])
    return seen


def wrong_state(world: World) -> dict[str, str]:
    """States of other ranks and of other runs."""

    def algorithm(tau: int = 3, width: int = 2, **options: Any) -> LocalUpdate:
        model = nn.Linear(2, width)
        return co2_of(model, torch.optim.SGD(model.parameters(), lr=0.1), tau=tau, **options)

    state = algorithm().state_dict()
    other = {f"rank{world.rank + 1}": state[f"rank{world.rank}"]}
    return {
        "rank": said(lambda: algorithm().load_state_dict(other)),
        "tau": said(lambda: algorithm(tau=4).load_state_dict(state)),
        "width": said(lambda: algorithm(width=3).load_state_dict(state)),
        "same": said(lambda: algorithm(outer_lr=0.5).load_state_dict(state)),
    }


def late(world: World, dtypes: list[str]) -> list[dict[str, Any]]:
    """Rank 1 is late in round 2, until all others have given up; what they are told, and when."""
    store = dist.distributed_c10d._get_default_store()
    found = []
    for dtype in dtypes:

        def others_gave_up(key: str = dtype) -> None:
            limit = time.monotonic() + 10 * DEADLINE
            while store.add(key, 0) < world.layout.world_size - 1 and time.monotonic() < limit:
                time.sleep(0.05)

        found.append(_lose(world, dtype, others_gave_up))
        store.add(dtype, 1)
        dist.barrier()  # all go on, with new communicators
    return found


def _lose(world: World, dtype: str, fails: Callable[[], None]) -> dict[str, Any]:
    model = network().to(world.device)
    optim = optimizer(model, "sgd")

    def go_on() -> None:
        with co2_of(model, optim, tau=2, timeout=DEADLINE, dtype=dtype):  # type: ignore[arg-type]
            for step in range(10):
                if step == 4 and world.rank == 1:
                    fails()
                train(model, optim, world.rank, range(step, step + 1))

    return {"told": said(go_on)}


def _inside(
    case: dict[str, Any], world: World
) -> tuple[nn.Module, torch.optim.Optimizer, LocalUpdate]:
    workers = Workers.per_node()
    assert workers.inner is not None
    model = network(seed=world.rank // 2)  # alike in a node; the first node's is the one
    if case["inside"] == "fsdp":
        mesh = DeviceMesh.from_group(workers.inner, "cpu")
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif case["inside"] == "ddp":
        model = DistributedDataParallel(model, process_group=workers.inner)
    optim = optimizer(model, case["inner"])
    worker = workers if case.get("explicit") else "node"
    kind = partial(algorithm_of, case["algorithm"])
    return model, optim, kind(model, optim, worker=worker, **case["options"])


def _train_inside(
    model: nn.Module, optim: torch.optim.Optimizer, world: World, steps: range
) -> None:
    """Each rank of a node takes half of the worker's batch."""
    worker, place = divmod(world.rank, 2)
    for step in steps:
        given, wanted = (part[4 * place : 4 * place + 4] for part in batch(worker, step))
        optim.zero_grad()
        (model(given) - wanted).square().mean().backward()
        optim.step()


def evaluated_inside(world: World) -> list[float]:
    """Losses of FSDP2 models that stay gathered: live, consensus, live again, and live anew.

    In the middle of a round, without a backward pass in between.
    """
    case = {"inside": "fsdp", "inner": "sgd", "algorithm": "SlowMo", "options": {"tau": 2}}
    model, optim, slowmo = _inside(case, world)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(reshard_after_forward=False)
    found = []

    def evaluate() -> None:
        with torch.no_grad():
            found.append(float(loss(model, 7, 7)))

    with slowmo:
        _train_inside(model, optim, world, range(3))
        evaluate()
        with slowmo.consensus():
            evaluate()
        evaluate()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        evaluate()
    return found


def wrong_inside(world: World, folder: str) -> dict[str, Any]:
    """Failures and checkpoints where a worker is a node."""
    found: dict[str, Any] = {}

    def bare(steps: int) -> None:
        model = network()
        optim = optimizer(model, "sgd")
        with co2_of(model, optim, tau=2, worker="node"):
            train(model, optim, world.rank, range(steps))

    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    bare(0)
    found["groups"] = len(groups) - before
    found["bare"] = said(lambda: bare(3))
    for inside in ("ddp", "fsdp"):
        case = {
            "inside": inside,
            "inner": "adamw",
            "algorithm": "CO2",
            "options": {"tau": 2, "check_every": 1},
        }

        def poisoned(case: dict[str, Any] = case) -> None:
            model, optim, algorithm = _inside(case, world)
            with algorithm:
                _train_inside(model, optim, world, range(3))
                if world.rank == 2:  # the first rank of the second node, in its own part
                    algorithm._outer.launch = _poison(algorithm._outer.launch)  # type: ignore[method-assign]
                _train_inside(model, optim, world, range(3, 8))

        def tampered(case: dict[str, Any] = case) -> None:
            model, optim, algorithm = _inside(case, world)
            with algorithm:
                _train_inside(model, optim, world, range(3))
                if world.rank == 3:
                    algorithm._outer.state.anchor[1] += 1
                _train_inside(model, optim, world, range(3, 8))

        found[f"{inside} nan"] = said(poisoned)
        found[f"{inside} drift"] = said(tampered)
        model, optim, algorithm = _inside(case, world)
        with algorithm:
            _train_inside(model, optim, world, range(5))
            dcp.save({"algorithm": algorithm}, checkpoint_id=f"{folder}/{inside}")
            anchor = algorithm._outer.state.anchor.clone()
            flying = algorithm._outer.flights[0].vector.clone()
        _, _, other = _inside(case, world)
        with other:
            dcp.load({"algorithm": other}, checkpoint_id=f"{folder}/{inside}")
            found[f"{inside} loaded"] = [
                torch.equal(other._outer.state.anchor, anchor),
                torch.equal(other._outer.flights[0].vector, flying),
                other.stats().steps,
            ]
    sharded = network()
    fully_shard(sharded, mesh=DeviceMesh("cpu", list(range(4))))
    found["over all"] = said(lambda: LocalSGD(sharded, optimizer(sharded, "sgd"), worker="node"))
    found["per gpu"] = said(lambda: LocalSGD(sharded, optimizer(sharded, "sgd")))
    return found


def _poison(
    launch: Callable[[torch.Tensor], PendingAverage],
) -> Callable[[torch.Tensor], PendingAverage]:
    def launch_nan(given: torch.Tensor) -> PendingAverage:
        given[0] = torch.nan
        return launch(given)

    return launch_nan
