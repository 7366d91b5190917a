"""What ranks that divide a model exchange: from a schedule of data parallelism to one of a mesh.

`tp` consecutive ranks of a node hold a model together. A strategy knows nothing of it: it is asked
for the schedule of one rank's part (`Workload.share`) in a layout where a tensor-parallel group
counts as one rank. `apply_tensor_parallelism` then gives its groups a stride, so that every rank
meets those with its own place in their groups, and inserts what the ranks of a group exchange. So
every strategy combines with it.

Ranks that divide the experts of a layer exchange tokens in the same way. They are consecutive, and
each tensor-parallel rank is one of them: groups `of_experts` keep their members.

All exchanges of a pass over a block are made before it, beside it and behind it. Where inside of
the pass they come changes a time only through what else is under way on the same links.
"""

from collections.abc import Iterator
from dataclasses import replace

from co2sim.schedule.schedule import (
    After,
    Collective,
    Compute,
    Op,
    Schedule,
    Work,
)

TENSOR = "tensor"
"""The stream of exchanges among tensor-parallel ranks: their own communicator."""

_NAME = "exchange"


def apply_tensor_parallelism(schedule: Schedule, tp: int) -> Schedule:
    """The schedule of ranks of which `tp` share every layer, with all that passes exchange.

    The same one where nothing is exchanged.
    """
    works = (work for work in schedule.works if isinstance(work, Compute))
    if tp == 1 and not any(part.exchanges for work in works for part in (work, *work.parts)):
        return schedule
    return replace(schedule, body=tuple(_Body(schedule, tp).ops()))


class _Body:
    """Where the streams stand: their last op, and the last exchange behind it."""

    def __init__(self, schedule: Schedule, tp: int) -> None:
        self.schedule, self.tp = schedule, tp
        self.made: dict[int, Work] = {}
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
                yield from self._plain(op, self._own(op.work))
            else:
                for one in _pieces(op, op.work):
                    yield from self._pass(one)

    def _own(self, work: Work) -> Work:
        """The same work without its exchanges, or among ranks that hold the same part: once each.

        Long schedules have few works, and objects that are the same need not be compared.
        """
        if id(work) not in self.made:
            if isinstance(work, Collective) and work.group.of_experts:
                own: Work = work
            elif isinstance(work, Collective):
                own = replace(work, group=replace(work.group, stride=self.tp))
            else:
                own = replace(work, exchanges=None, exchanged=_all(work))
            self.made[id(work)] = own
        return self.made[id(work)]

    def _plain(self, op: Op, work: Work) -> Iterator[Op]:
        """An op that does `work` behind the exchanges of the one before it on its stream."""
        wait = self.exchanges_before.pop(op.stream, None)
        yield Op(op.name, work, op.stream, (*op.after, wait) if wait else op.after)
        self.ops_before[op.stream] = After(op.name)

    def _pass(self, op: Op) -> Iterator[Op]:
        """A pass between its exchanges; those beside it start when it may."""
        assert isinstance(op.work, Compute)
        found = op.work.exchanges
        if found is None:
            yield from self._plain(op, op.work)
            return
        started = len(found.before) + len(found.beside)
        ended = started + len(found.behind)
        names = [f"{op.name}.{_NAME}{number}" for number in range(1, ended + 1)]
        waits, behind = (self.ops_before[op.stream],), (After(op.name),)
        for name, work in zip(names, (*found.before, *found.beside), strict=False):
            yield Op(name, work, TENSOR, waits)
        if found.before:
            self.exchanges_before[op.stream] = After(names[len(found.before) - 1])
        yield from self._plain(op, self._own(op.work))
        for name, work in zip(names[started:], found.behind, strict=True):
            yield Op(name, work, TENSOR, behind)
        if found.behind or found.beside:
            self.exchanges_before[op.stream] = After(names[-1])


def _all(work: Compute) -> tuple[Collective, ...]:
    found = work.exchanges
    return (*found.before, *found.beside, *found.behind) if found else ()


def _behind(op: Op) -> int:
    """The number of the last exchange that an op's stream waits for behind it; 0 for none."""
    found = op.work.exchanges if isinstance(op.work, Compute) else None
    if found is None or not (found.behind or found.beside):
        return 0
    return len(found.before) + len(found.beside) + len(found.behind)


def _pieces(op: Op, work: Compute) -> list[Op]:
    """The parts of a fused op as separate ops, if ranks exchange something between them."""
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
