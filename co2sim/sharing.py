"""Which collectives of a schedule may meet others on a link."""

from co2sim.lowering import Lowered
from co2sim.schedule import Collective


def shared_works(lowered: Lowered) -> set[tuple[int, str]]:
    """Works, by number and stream, that may meet others on a link or wait for their communicator.

    Those of one communicator in one stream follow each other. NICs that attain less while their
    node computes are shared with that; how much credit a shaped link has depends on what came
    before. Free communication shares nothing.
    """
    if lowered.free:
        return set()
    schedule, users = lowered.schedule, dict[object, set[tuple[str, int]]]()
    nics = {("nic", lowered.folding.node(index)) for index in range(len(lowered.classes))}
    works = {
        (number, op.stream): (lowered.communicators[op.work.group], transfers)
        for op, number, transfers in zip(
            schedule.body, schedule.work_numbers, lowered.transfers, strict=True
        )
        if isinstance(op.work, Collective)
    }
    for (_, stream), (together, transfers) in works.items():
        for one, transfer in zip(together, transfers, strict=True):
            for link in transfer.loads:
                users.setdefault(link, set()).add((stream, one.number))
    return {
        key
        for key, (together, transfers) in works.items()
        if any(
            (one.exclusive and (transfer.solo or transfer.latency))
            or any(len(users[link]) > 1 for link in transfer.loads)
            or (lowered.contend and any(link in nics for link in transfer.loads))
            or any(link in lowered.bursts for link in transfer.loads)
            for one, transfer in zip(together, transfers, strict=True)
        )
    }
