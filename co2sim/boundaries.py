"""Whether anything of a round is under way when the next one begins."""

from collections.abc import Sequence


def apart(streams: Sequence[str], offsets: Sequence[Sequence[int]]) -> bool:
    """Whether the last op of a round waits for all others of it, and all of the next for that op.

    They may do so through others. `streams` and `offsets` are those of the ops of a round: see
    `Schedule`. An op also waits for the one before it on its stream.
    """
    waits = _waits(streams, offsets)
    follows: list[bool] = []
    for found in waits:
        follows.append(any(n == -1 or (n >= 0 and follows[n]) for n in found))
    precedes = [False] * len(waits)
    precedes[-1] = True
    for place in range(len(waits) - 1, -1, -1):
        for n in waits[place] if precedes[place] else ():
            if n >= 0:
                precedes[n] = True
    return all(follows) and all(precedes)


def _waits(streams: Sequence[str], offsets: Sequence[Sequence[int]]) -> list[list[int]]:
    """The places in the round of what every op waits for; those of rounds before are below 0."""
    latest = {stream: place - len(streams) for place, stream in enumerate(streams)}
    found = []
    for place, (stream, back) in enumerate(zip(streams, offsets, strict=True)):
        found.append([latest[stream], *(place - offset for offset in back)])
        latest[stream] = place
    return found
