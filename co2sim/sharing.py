"""Which collectives of a schedule may meet others on a link."""

from co2sim.lowering import Lowered
from co2sim.schedule import Collective


def shared_works(lowered: Lowered) -> set[int]:
    """Works, by number, that may meet others on a link or wait for their communicator.

    Those of one communicator in one stream follow each other. NICs that attain less while their
    node computes are shared with that; how much credit a shaped link has depends on what came
    before. Free communication shares nothing.
    """
    if lowered.free:
        return set()
    schedule, users = lowered.schedule, dict[object, set[tuple[str, int]]]()
    nics = {("nic", lowered.folding.node(index)) for index in range(len(lowered.classes))}
    transfers_of = dict(zip(schedule.work_numbers, lowered.transfers, strict=True))
    works = {
        number: (lowered.communicators[work.group], transfers_of[number])
        for number, work in enumerate(schedule.works)
        if isinstance(work, Collective)
    }
    for number, (together, transfers) in works.items():
        for one, transfer in zip(together, transfers, strict=True):
            for link in transfer.loads:
                users.setdefault(link, set()).add((schedule.work_streams[number], one.number))
    return {
        number
        for number, (together, transfers) in works.items()
        if any(
            (one.exclusive and (transfer.solo or transfer.latency))
            or any(len(users[link]) > 1 for link in transfer.loads)
            or (lowered.contend and any(link in nics for link in transfer.loads))
            or any(link in lowered.shapers for link in transfer.loads)
            or transfer.host is not None
            for one, transfer in zip(together, transfers, strict=True)
        )
    }
