"""The memory of a GPU on the terminal: at the peak, over a step, and what would save some."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from co2sim.common.tables import console, print_lines, print_table
from co2sim.common.units import counted, scaled
from co2sim.prediction.result import Result
from co2sim.prediction.step_memory import Change, StepMemory
from co2sim.training.memory import GIB, OVERHEAD, reserved

_MAX = 6
"""Changes that would fit that are shown."""
_RESERVED = ("cached", "fragmentation")
"""What PyTorch holds and does not count as allocated."""


def print_memory(out: Console, r: Result, memory: StepMemory | None = None) -> None:
    """Memory by item; PyTorch counts those that it allocates, and not what is beside them.

    With the `memory` of a step the moment of the peak, the other moments, and what would save some.
    """
    items = r.memory_bytes_per_gpu
    rows = [(name, scaled(size, "B")) for name, size in items.items() if name not in OVERHEAD]
    beside = [name for name in OVERHEAD if name in items]
    if beside:
        held = [("allocated, as max_memory_allocated counts", r.allocated_bytes_per_gpu)]
        held += [(name, items[name]) for name in beside if name in _RESERVED]
        held += [("reserved, as max_memory_reserved counts", reserved(items))] * (len(held) > 1)
        held += [(name, items[name]) for name in beside if name not in _RESERVED]
        rows[-1:-1] = [(name, scaled(size, "B")) for name, size in held]
    room = f"{scaled(r.gpu_memory_bytes, 'B')} ({r.gpu_memory_bytes / GIB:.3g} GiB)"
    if r.memory_bytes_low is not None and r.memory_bytes_high is not None:
        ends = scaled(r.memory_bytes_low, "B"), scaled(r.memory_bytes_high, "B")
        rows.append(("90 % interval", " to ".join(ends)))
    peak = f"; the peak is in the {when(memory)}" if memory else ""
    print_table(out, f"memory per GPU: {r.memory_word} in {room}{peak}", ("item", "size"), rows)
    if r.memory_interval_source:
        print_lines(out, f"90 % interval of memory: {r.memory_interval_source}", "")
    if memory:
        _print_step(out, memory)


def when(memory: StepMemory) -> str:
    """The moment of the peak, and the stage if there are several."""
    moment, stages = memory.line.moments[memory.line.peak], memory.job.workload.pp
    of = f" of stage {memory.stage.number + 1} of {stages}" if stages > 1 else ""
    return f"{_NAMES.get(moment, moment)}{of}"


_NAMES = {"loss": "forward of the loss", "optimizer": "optimizer step"}


def _print_step(out: Console, memory: StepMemory) -> None:
    """What is allocated at the moments that matter, and what each option would save."""
    print_table(out, "what PyTorch holds at", ("moment", "allocated"), moments(memory))
    rows = savings(memory)
    if rows:
        title = "what each of these options alone would save at the peak"
        print_table(out, title, SAVINGS, rows, left=1)
    else:
        print_lines(out, "no option that was tried saves memory", "")


def moments(memory: StepMemory) -> list[tuple[str, str]]:
    """The moments that matter, and what is allocated then."""
    line = memory.line
    return [(name, scaled(line.total[place], "B")) for name, place in line.milestones.items()]


SAVINGS = ("option", "saves", "then", "memory")


def savings(memory: StepMemory) -> list[tuple[str, str, str, str]]:
    """A row for each option that saves memory, under `SAVINGS`."""
    total = memory.items["total"]
    return [
        (change.words, scaled(total - change.total, "B"), scaled(change.total, "B"), change.fit)
        for change in memory.savings
    ]


def print_step_memory(results: Sequence[Result], memories: Sequence[StepMemory]) -> None:
    """The memory of each case, behind its name where there are several."""
    out = console()
    for result, memory in zip(results, memories, strict=True):
        if len(results) > 1:
            on = f" on {counted(result.gpus, 'GPU')}"
            print_lines(out, Text.assemble((result.strategy, "bold"), on), "")
        print_memory(out, result, memory)


def print_fitting(out: Console, memory: StepMemory) -> None:
    """What would fit in place of a case that does not."""
    heading, rows = fitting(memory)
    print_lines(out, "`co2sim plan` finds what fits and costs least", "")
    print_table(out, heading, ("instead", "memory per GPU"), rows)


def fitting(memory: StepMemory) -> tuple[str, list[tuple[str, str]]]:
    """What makes a case that does not fit smaller: changes with their sizes, and a heading."""
    room, work = scaled(memory.room, "B"), memory.job.workload
    as_is = f"micro-batch {work.micro_batch}, recompute {work.recompute}"
    shown = memory.fitting[:_MAX]
    if shown and _fits(shown[0], memory):
        heading = f"what would fit in {room} ({as_is}, unless it says more)"
    else:
        heading = f"nothing tried fits in {room}; the smallest"
    sizes = (scaled(change.total, "B") for change in shown)
    return heading, [
        (change.words, f"{size}{f', {change.fit}' * _fits(change, memory)}")
        for change, size in zip(shown, sizes, strict=True)
    ]


def _fits(change: Change, memory: StepMemory) -> bool:
    return change.total <= memory.room
