"""Tensor parallelism: how a schedule of data parallelism becomes one in which ranks share layers.

`tp` consecutive ranks of a node hold a model together. A strategy knows nothing of it: it is asked
for the schedule of one rank's part (`Workload.share`) in a layout where a tensor-parallel group
counts as one rank. `divided` then gives its groups a stride, so that every rank meets those with
its own place in their groups, and inserts what the ranks of a group exchange. So every strategy
combines with it.

All exchanges of a pass over a block are made before it, beside it and behind it. Where inside of
the pass they come changes a time only through what else is under way on the same links.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from co2sim.errors import OptionError
from co2sim.schedule import After, Collective, Compute, Layout, Op, Schedule

TENSOR = "tensor"
"""The stream of exchanges among tensor-parallel ranks: their own communicator."""

_NAME = "exchange"


def data_layout(layout: Layout, tp: int) -> Layout:
    """The layout in which `tp` GPUs of a node count as one. Raises OptionError if they are none."""
    g = layout.gpus_per_node
    if g % tp:
        raise OptionError(
            f"tp={tp} does not divide the {g} GPUs of a node: tensor-parallel GPUs are those of one"
            " node"
        )
    return layout.strided(tp)


def divided(schedule: Schedule, tp: int) -> Schedule:
    """The schedule of ranks of which `tp` share every layer; the same one if they are alone."""
    if tp == 1:
        return schedule
    return replace(schedule, body=tuple(_Body(schedule, tp).ops()))


class _Body:
    """Where the streams stand: their last op, and the last exchange behind it."""

    def __init__(self, schedule: Schedule, tp: int) -> None:
        self.schedule, self.tp = schedule, tp
        last = {op.stream: op for op in schedule.body}  # a round follows the one before
        self.ops_before = {stream: After(op.name, 1) for stream, op in last.items()}
        self.exchanges_before = {
            stream: After(f"{op.name}.{_NAME}{number}", 1)
            for stream, op in last.items()
            if (number := _behind(op))
        }

    def ops(self) -> Iterator[Op]:
        """The ops of the body in order of issue."""
        for op in self.schedule.body:
            if isinstance(op.work, Collective):
                group = replace(op.work.group, stride=self.tp)
                yield from self._plain(replace(op, work=replace(op.work, group=group)))
            else:
                for one in _pieces(op, op.work):
                    yield from self._pass(one)

    def _plain(self, op: Op) -> Iterator[Op]:
        """An op behind the exchanges of the one before it on its stream."""
        wait = self.exchanges_before.pop(op.stream, None)
        yield replace(op, after=(*op.after, wait)) if wait else op
        self.ops_before[op.stream] = After(op.name)

    def _pass(self, op: Op) -> Iterator[Op]:
        """A pass between its exchanges; those beside it start when it may."""
        assert isinstance(op.work, Compute)
        found = op.work.exchanges
        if found is None:
            yield from self._plain(op)
            return
        names = (f"{op.name}.{_NAME}{number}" for number in count(1))
        waits = (self.ops_before[op.stream],)
        before, beside, behind = (
            [Op(name, work, TENSOR) for work, name in zip(works, names, strict=False)]
            for works in (found.before, found.beside, found.behind)
        )
        for one in (*before, *beside):
            yield replace(one, after=waits)
        if before:
            self.exchanges_before[op.stream] = After(before[-1].name)
        yield from self._plain(replace(op, work=replace(op.work, exchanges=None)))
        for one in behind:
            yield replace(one, after=(After(op.name),))
        if behind or beside:
            self.exchanges_before[op.stream] = After((behind or beside)[-1].name)


def _behind(op: Op) -> int:
    """The number of the last exchange that an op's stream waits for behind it; 0 for none."""
    found = op.work.exchanges if isinstance(op.work, Compute) else None
    if found is None or not (found.behind or found.beside):
        return 0
    return len(found.before) + len(found.beside) + len(found.behind)


def _pieces(op: Op, work: Compute) -> list[Op]:
    """The parts of a fused op as ops of their own, if ranks exchange something between them."""
    if not any(part.exchanges for part in work.parts):
        return [op]
    last = len(work.parts)
    return [
        Op(
            op.name if number == last else f"{op.name}.{number}",
            part,
            op.stream,
            op.after if number == 1 else (),
        )
        for number, part in enumerate(work.parts, 1)
    ]
