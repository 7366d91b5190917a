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
            stream: After(f"{op.name}.{_NAME}{count}", 1)
            for stream, op in last.items()
            if (count := _behind(op))
        }

    def ops(self) -> Iterator[Op]:
        """The ops of the body in order of issue."""
        for op in self.schedule.body:
            if isinstance(op.work, Collective):
                yield from self._plain(op, self._own(op.work))
            else:
                for piece in _pieces(op, op.work):
                    yield from self._pass(piece)

    def _own(self, work: Work) -> Work:
        """The same work without its exchanges, or among ranks that hold the same part: once each.

        Long schedules have few works, and objects that are the same need not be compared.
        """
        if id(work) not in self.made:
            if isinstance(work, Collective) and work.group.of_experts:
                stripped: Work = work
            elif isinstance(work, Collective):
                stripped = replace(work, group=replace(work.group, stride=self.tp))
            else:
                stripped = replace(work, exchanges=None, exchanged=_all(work))
            self.made[id(work)] = stripped
        return self.made[id(work)]

    def _plain(self, op: Op, work: Work) -> Iterator[Op]:
        """An op that does `work` behind the exchanges of the one before it on its stream."""
        wait = self.exchanges_before.pop(op.stream, None)
        yield Op(op.name, work, op.stream, (*op.after, wait) if wait else op.after, op.turn)
        self.ops_before[op.stream] = After(op.name)

    def _pass(self, op: Op) -> Iterator[Op]:
        """A pass between its exchanges; those beside it start when it may."""
        assert isinstance(op.work, Compute)
        exchanges = op.work.exchanges
        if exchanges is None:
            yield from self._plain(op, op.work)
            return
        started = len(exchanges.before) + len(exchanges.beside)
        ended = started + len(exchanges.behind)
        names = [f"{op.name}.{_NAME}{index}" for index in range(1, ended + 1)]
        waits, behind = (self.ops_before[op.stream],), (After(op.name),)
        for name, work in zip(names, (*exchanges.before, *exchanges.beside), strict=False):
            yield Op(name, work, TENSOR, waits, op.turn)
        if exchanges.before:
            self.exchanges_before[op.stream] = After(names[len(exchanges.before) - 1])
        yield from self._plain(op, self._own(op.work))
        for name, work in zip(names[started:], exchanges.behind, strict=True):
            yield Op(name, work, TENSOR, behind, op.turn)
        if exchanges.behind or exchanges.beside:
            self.exchanges_before[op.stream] = After(names[-1])


def _all(work: Compute) -> tuple[Collective, ...]:
    exchanges = work.exchanges
    return (*exchanges.before, *exchanges.beside, *exchanges.behind) if exchanges else ()


def _behind(op: Op) -> int:
    """The number of the last exchange that an op's stream waits for behind it; 0 for none."""
    exchanges = op.work.exchanges if isinstance(op.work, Compute) else None
    if exchanges is None or not (exchanges.behind or exchanges.beside):
        return 0
    return len(exchanges.before) + len(exchanges.beside) + len(exchanges.behind)


def _pieces(op: Op, work: Compute) -> list[Op]:
    """The parts of a fused op as separate ops, if ranks exchange something between them."""
    if not any(part.exchanges for part in work.parts):
        return [op]
    last = len(work.parts)
    return [
        Op(
            op.name if index == last else f"{op.name}.{index}",
            part,
            op.stream,
            op.after if index == 1 else (),
            op.turn,
        )
        for index, part in enumerate(work.parts, 1)
    ]
