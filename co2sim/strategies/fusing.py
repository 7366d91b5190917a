"""Long rounds with fewer ops: passes over blocks that nothing comes between become one op."""

from collections.abc import Sequence
from dataclasses import replace

from co2sim.schedule import After, Compute, Op
from co2sim.strategies.step import Step


def fused(step: Step) -> Step:
    """The same step, with computes of one kernel in a row as one op.

    A row is on one stream. Only its first op waits for other streams, or for the step before; only
    its last op is waited for. So it takes the same time as its ops do, but with fewer of them.
    """
    rows = _rows(step)
    names = {op.name: _name(row) for row in rows for op in row}
    works: dict[tuple[int, ...], Compute] = {}
    ops = [
        Op(
            names[row[0].name],
            _work(row, works) if len(row) > 1 else row[0].work,
            row[0].stream,
            tuple(After(names[wait.op], wait.rounds_ago) for wait in row[0].after),
        )
        for row in rows
    ]
    needs, ends, gathers = (
        tuple(names[name] for name in which) for which in (step.needs, step.ends, step.gathers)
    )
    return replace(step, ops=ops, needs=needs, ends=ends, gathers=gathers)


def _rows(step: Step) -> list[list[Op]]:
    streams = {op.name: op.stream for op in step.ops}
    awaited = {wait.op for op in step.ops for wait in op.after if streams[wait.op] != op.stream}
    awaited.update(step.ends)
    rows: list[list[Op]] = []
    growing: dict[str, list[Op]] = {}
    for op in step.ops:
        row = growing.get(op.stream)
        if row and _follows(op, row[-1], streams) and op.name not in step.needs:
            row.append(op)
        else:
            row = growing[op.stream] = [op]
            rows.append(row)
        if op.name in awaited:
            del growing[op.stream]
    return rows


def _follows(op: Op, before: Op, streams: dict[str, str]) -> bool:
    """Whether an op does the same kernel as the one before it, and waits for nothing else."""
    return (
        isinstance(op.work, Compute)
        and isinstance(before.work, Compute)
        and op.work.kernel == before.work.kernel
        and all(streams[wait.op] == op.stream and not wait.rounds_ago for wait in op.after)
    )


def _name(row: Sequence[Op]) -> str:
    first, last = row[0].name, row[-1].name
    return first if first == last else f"{first}..{last.rpartition('.')[2]}"


def _work(row: Sequence[Op], known: dict[tuple[int, ...], Compute]) -> Compute:
    """All works of a row in one; rows of the same works share it."""
    key = tuple(id(op.work) for op in row)
    if key not in known:
        parts = tuple(op.work for op in row if isinstance(op.work, Compute))
        flops, moved = (sum(getattr(part, name) for part in parts) for name in _SUMMED)
        known[key] = Compute(parts[0].kernel, flops, moved, parts=parts)
    return known[key]


_SUMMED = ("flops", "memory_bytes")
