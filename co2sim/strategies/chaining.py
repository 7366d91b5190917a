"""Local steps one after the other, with averages between them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from co2sim.schedule import After, Op
from co2sim.strategies.fusing import fused
from co2sim.strategies.step import Step, check_ops

FUSED_FROM = 5_000
"""Ops of a round: about 50 ms of building and simulating."""


def prefixed(body: Sequence[Op], prefix: str) -> list[Op]:
    """The same ops with `prefix` before every name; their works are shared."""
    return [
        Op(
            prefix + op.name,
            op.work,
            op.stream,
            tuple([After(prefix + w.op, w.rounds_ago) for w in op.after]) if op.after else (),
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
    for prefix, (inner, extra), tail in zip(prefixes, pairs, tails, strict=True):
        ops = prefixed(inner.ops, prefix) if prefix else inner.ops
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
