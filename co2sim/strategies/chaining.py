"""Local steps one after the other, with averages between them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from co2sim.schedule.schedule import After, Compute, Op, Turn
from co2sim.strategies.step import Step, check_ops


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
            row[0].turn,
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


def _work(row: Sequence[Op], works: dict[tuple[int, ...], Compute]) -> Compute:
    """All works of a row in one; rows of the same works share it."""
    key = tuple(id(op.work) for op in row)
    if key not in works:
        parts = tuple(op.work for op in row if isinstance(op.work, Compute))
        flops, moved = (sum(getattr(part, name) for part in parts) for name in _SUMMED)
        works[key] = Compute(parts[0].kernel, flops, moved, parts=parts)
    return works[key]


_SUMMED = ("flops", "memory_bytes")


FUSED_FROM = 5_000
"""Ops of a round: about 50 ms of building and simulating."""


def _of_local_step(body: Sequence[Op], number: int, prefix: str) -> list[Op]:
    """The same ops as those of a local step, with `prefix` before names; works are shared."""
    return [
        Op(
            prefix + op.name,
            op.work,
            op.stream,
            tuple([After(prefix + w.op, w.rounds_ago) for w in op.after]) if op.after else (),
            Turn(number, op.turn.micro_step),
        )
        for op in body
    ]


def chain(step: Step, times: int = 1, extras: Mapping[int, Step] | None = None) -> tuple[Op, ...]:
    """`step` repeated, with `extras[k]` after repetition k; every step waits for the one before.

    The first waits for what ended the previous round. Names get the prefix `s{k}.` if `times` > 1.
    Steps of long rounds are fused.
    """
    if len(step.ops) * times > FUSED_FROM:
        step = fused(step)
    check_ops(len(step.ops) * times, f"{len(step.ops)} ops in each of {times} local steps")
    inside = {op.name: op.stream for op in step.ops}
    step = replace(step, ops=[_without_implied(op, inside) for op in step.ops])
    nothing = Step(())
    pairs = [
        (step.without_gathers() if extra.regathers else step, extra)
        for extra in ((extras or {}).get(k, nothing) for k in range(times))
    ]
    prefixes = [f"s{k}." if times > 1 else "" for k in range(times)]
    tails = [
        extra.ends or tuple(prefix + end for end in inner.ends)
        for prefix, (inner, extra) in zip(prefixes, pairs, strict=True)
    ]
    streams = {op.name: op.stream for _, extra in pairs for op in extra.ops}
    for prefix, (inner, _) in zip(prefixes, pairs, strict=True):
        streams.update((prefix + end, inside[end]) for end in inner.ends)
    before = tuple(After(name, rounds_ago=1) for name in tails[-1])
    body: list[Op] = []
    for number, (prefix, (inner, extra), tail) in enumerate(
        zip(prefixes, pairs, tails, strict=True)
    ):
        ops = _of_local_step(inner.ops, number, prefix) if prefix else inner.ops
        body += _waiting(ops, {prefix + need for need in inner.needs}, before, streams)
        ends = tuple(After(prefix + end) for end in inner.ends)
        added = [_without_implied(op, streams) for op in extra.ops]
        body += _waiting(added, set(extra.needs), ends, streams)
        before = tuple(After(name) for name in tail)
    return tuple(body)


def _waiting(
    ops: Iterable[Op], needs: set[str], before: Sequence[After], streams: Mapping[str, str]
) -> list[Op]:
    """The ops, those in `needs` with further waits."""
    return [
        replace(op, after=op.after + _kept(before, op.stream, streams)) if op.name in needs else op
        for op in ops
    ]


def _without_implied(op: Op, streams: Mapping[str, str]) -> Op:
    """Drop waits for the op's own stream: order implies them."""
    if not op.after:
        return op
    return replace(op, after=_kept(op.after, op.stream, streams))


def _kept(waits: Sequence[After], stream: str, streams: Mapping[str, str]) -> tuple[After, ...]:
    return tuple(wait for wait in waits if streams[wait.op] != stream)
