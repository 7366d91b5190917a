"""Changes that make a configuration fit in memory, with the memory that each needs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice, product
from typing import cast

from rich.console import Console

from co2sim.case import Case
from co2sim.console.tables import print_lines, print_table
from co2sim.errors import Co2simError, OptionError
from co2sim.memory import model_states
from co2sim.prepared import Prepared, schedule_of
from co2sim.schedule import Schedule
from co2sim.strategies import STRATEGIES, Strategy, parse, with_options
from co2sim.strategies.step import title
from co2sim.units import Bytes, scaled
from co2sim.workload import AttentionKernel, Recompute

_SHARDED = ("zero2", "zero3")
"""Strategies, or inner ones, that keep less than a whole model on every GPU."""
_DOUBLINGS = 6
"""Of the GPUs: up to 64 times as many."""
_MORE_GPUS = "more GPUs"
_FEWER_SAMPLES = "a smaller --micro-batch"
_WHAT_HELPS = {
    "parameters": ("a strategy that shards them, such as zero3", _MORE_GPUS),
    "gradients": ("a strategy that shards them, such as zero2", _MORE_GPUS),
    "optimizer": ("a strategy that shards it, such as zero2", _MORE_GPUS),
    "secondary": ("hpz=false",),
    "outer": ("worker=node",),
    "gathered": ("a smaller prefetch",),
    "activations": ("--recompute full", _FEWER_SAMPLES),
    "checkpoints": (_FEWER_SAMPLES,),
    "logits": ("--loss fused", _FEWER_SAMPLES),
}
"""What makes an item of memory smaller."""
_MOST = 6
"""Alternatives that are shown."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A configuration near one that does not fit: what to change, and its bytes on a GPU."""

    changes: dict[str, str]
    memory: Bytes


def largest(prepared: Prepared) -> str:
    """The largest item of memory, and what makes it smaller, in a line."""
    memory, job = prepared.memory(), prepared.job.share
    name = max((item for item in memory if item != "total"), key=lambda item: memory[item])
    idle = {f"--recompute {job.recompute}", f"--loss {job.loss}"}
    if job.micro_batch == 1:
        idle.add(_FEWER_SAMPLES)
    whole = model_states(job)
    if name in whole and memory[name] < whole[name]:
        idle |= {option for option in _WHAT_HELPS[name] if option != _MORE_GPUS}
    twice = prepared.cluster.resized(2 * prepared.cluster.layout.world_size)
    if replace(prepared, cluster=twice).memory()[name] >= memory[name]:
        idle.add(_MORE_GPUS)
    helps = [option for option in _WHAT_HELPS.get(name, ()) if option not in idle]
    less = f": less with {', or '.join(helps)}" if helps else ""
    return f"the largest item is {name}, {scaled(memory[name], 'B')}{less}"


def print_fitting(out: Console, case: Case, settle: Callable[[Case], Case]) -> None:
    """Print what to change so that the case fits, or what comes nearest.

    `settle` gives a case numbers for what it leaves open.
    """
    if case.pp > 1:  # its stages are simulated one by one
        print_lines(out, "less memory: more stages (--pp), --tp, or --recompute full", "")
        return
    asked = parse(case.strategy) if isinstance(case.strategy, str) else case.strategy
    prepared = settle(case).prepare()
    memory = prepared.cluster.gpu.memory
    print_lines(out, largest(prepared), "`co2sim plan` finds what fits and costs least", "")
    found = list(alternatives(prepared, asked))
    fitting = _fewest_changes([one for one in found if one.memory <= memory])
    heading = f"what would fit in {scaled(memory, 'B')}"
    if not fitting:
        fitting = sorted(found, key=lambda one: one.memory)[:1]
        heading = f"nothing tried fits in {scaled(memory, 'B')}; the smallest"
    rows = [
        (
            " ".join(f"--{name} {value}" for name, value in one.changes.items()),
            scaled(one.memory, "B"),
        )
        for one in islice(filter(partial(_runs, case, settle), fitting), _MOST)
    ]
    if rows:
        print_table(out, heading, ("instead", "memory per GPU"), rows)


def alternatives(prepared: Prepared, asked: Strategy) -> Iterator[Alternative]:
    """Combinations of a sharded strategy, more recomputation, a smaller micro-batch, more GPUs.

    Those with the fewest changes come first. What the strategy `asked` for leaves open stays open.
    """
    job, layout = prepared.job, prepared.cluster.layout
    strategies = {"": prepared.strategy}
    for name in _SHARDED:
        if (open_ := _sharded(asked, name)) and (settled := _sharded(prepared.strategy, name)):
            strategies[_text(open_)] = settled
    eager = job.attention == "eager"
    attentions = ["", *(["flash"] if eager else [])]
    recomputes = ["", *(["selective"] if eager and job.recompute == "none" else [])]
    if job.recompute != "full" and any(block.boundary_bytes for block in job.model.blocks):
        recomputes.append("full")
    halves = [job.micro_batch >> times for times in range(1, job.micro_batch.bit_length())]
    gpus = [layout.world_size << times for times in range(1, _DOUBLINGS + 1)]
    sizes = (["", *map(str, halves)], ["", *map(str, gpus)])
    points = product(strategies, attentions, recomputes, *sizes)
    names = ("strategy", "attention", "recompute", "micro-batch", "gpus")
    schedules: dict[str, Schedule] = {"": prepared.schedule}
    for point in sorted(points, key=lambda point: sum(map(bool, point))):
        changes = {name: value for name, value in zip(names, point, strict=True) if value}
        if not changes:
            continue
        text, attention, recompute, micro_batch, count = point
        if attention and recompute == "selective":  # which flash attention makes needless
            continue
        try:
            if text not in schedules:
                schedules[text] = schedule_of(strategies[text], job, layout)
            found = replace(
                prepared,
                strategy=strategies[text],
                schedule=schedules[text],
                job=replace(
                    job,
                    attention=cast(AttentionKernel, attention or job.attention),
                    recompute=cast(Recompute, recompute or job.recompute),
                    micro_batch=int(micro_batch or job.micro_batch),
                ),
                cluster=prepared.cluster.resized(int(count or layout.world_size)),
            )
            yield Alternative(changes, found.memory()["total"])
        except Co2simError:  # the cluster cannot hold them, or the strategy has no such option
            continue


def _sharded(strategy: Strategy, name: str) -> Strategy | None:
    """The same strategy with this inner one, or this one in its place; None if it is no other."""
    options = {option.name for option in fields(strategy)}  # type: ignore[arg-type]
    try:
        if {"worker", "inner"} <= options:
            worker = "site" if strategy.worker == "site" else "node"  # type: ignore[attr-defined]
            found = with_options(strategy, {"worker": worker, "inner": name})
        else:
            found = STRATEGIES[name]()
    except OptionError:  # another option rules it out
        return None
    return found if title(found) != title(strategy) else None


def _text(strategy: Strategy) -> str:
    """As it is given to --strategy without quotes."""
    return title(strategy).replace("(", ":").replace(", ", ",").removesuffix(")")


def _fewest_changes(found: list[Alternative]) -> list[Alternative]:
    """Those that change nothing in vain: no other one changes less of the same."""
    kept: list[Alternative] = []
    for one in found:
        if not any(_within(other.changes, one.changes) for other in kept):
            kept.append(one)
    return kept


def _within(few: dict[str, str], many: dict[str, str]) -> bool:
    """Whether `many` changes the same, and as far or further."""
    for name, value in few.items():
        match name:
            case _ if name not in many:
                return False
            case "micro-batch" | "gpus":
                further = int(many[name]) - int(value)
                if (further if name == "gpus" else -further) < 0:
                    return False
            case "strategy" if many[name] != value:
                return False
    return True


def _runs(case: Case, settle: Callable[[Case], Case], alternative: Alternative) -> bool:
    """Whether the changed case is allowed, and needs the memory that was promised."""
    changes = alternative.changes
    try:
        changed = replace(
            case,
            strategy=changes.get("strategy", case.strategy),
            attention=cast(AttentionKernel, changes.get("attention", case.attention)),
            recompute=cast(Recompute, changes.get("recompute", case.recompute)),
            micro_batch=int(changes.get("micro-batch", case.micro_batch)),
            gpus=int(changes["gpus"]) if "gpus" in changes else case.gpus,
        )
        return settle(changed).prepare().memory()["total"] == alternative.memory
    except Co2simError:  # a global batch that does not divide
        return False
