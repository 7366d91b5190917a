"""Watch ranks until all have ended; report the first failure to the others."""

import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from co2sim.units import Seconds
from realrun.launch.output import TICK, RankOutput
from realrun.launch.processes import RankProcess
from realrun.launch.watch import Hearts, Store, gone, tell

SILENT: Seconds = 30.0
"""A rank whose heart has stopped for so long is killed, once another one has ended."""

_WRONG_INPUT = 2
"""Exit code of every command of ours, and of most others, for input that it cannot use."""


def supervise(
    ranks: Sequence[RankProcess],
    store: Store,
    grace: Seconds,
    asked: Callable[[], object] = lambda: False,
    cut: Callable[[], bool] = lambda: False,
) -> int:
    """Pass on what the ranks print until all have ended: 0 if all did so with 0, else 1 or 2.

    It is 2, as of a command alone, where all that failed refused what they were given: then one of
    them has said why, and nothing is added.

    The first failure is reported to the others; ranks that still run `grace` later are killed. So
    is one without a heartbeat once others have ended, who would have waited for it.
    Rank 0's stdout is passed on as it is, every other line with its rank in front. Once the ranks
    were `asked` to end by SIGTERM, one that ends by it has not failed: it was not ready yet to do
    so in good order, and the others, which need it, end with it. Where `cut` says that a guard has
    killed the ranks, no rank is to blame, and the code is 1.
    """
    running = list(ranks)
    first: RankProcess | None = None
    late: list[RankProcess] = []
    frozen: list[RankProcess] = []
    codes: set[int] = set()
    deadline, hearts = float("inf"), Hearts(store)
    with RankOutput(ranks) as output:
        while running:
            output.forward(TICK)
            ended = _ended(running)
            if ended and cut():
                return 1
            if asked() and any(one.process.returncode == -signal.SIGTERM for one in ended):
                _kill(running)
                return int(first is not None)
            failed = [one for one in ended if one.process.returncode]
            codes |= {one.process.returncode for one in failed}
            if failed and first is None:  # of those found at once, one that was killed came first
                first = min(failed, key=lambda one: (one.process.returncode > 0, one.rank))
                deadline = time.monotonic() + grace
                with suppress(RuntimeError):
                    tell(store, first.rank, ending(first))
                    late = _killed(running, gone(store))
            frozen = frozen or _frozen(running, ranks, hearts)
            if time.monotonic() >= deadline:
                late, deadline = [*late, *running], float("inf")
                _kill(running)
    if first is None:
        return 0
    told = output.errors or any(one.process.stderr is None for one in ranks)  # on the terminal
    if codes == {_WRONG_INPUT} and not late and told:
        return _WRONG_INPUT
    _say(first, frozen, late)
    return 1


def _say(first: RankProcess, frozen: Sequence[RankProcess], late: Sequence[RankProcess]) -> None:
    """How it ended: who failed first, and who had to be killed."""
    words = f"error: rank {first.rank} {ending(first)}"
    if first in frozen:
        silent = f"gave no sign of life for {SILENT:g} s and had to be killed"
        words = f"error: {_named(frozen)} {silent}"
    if late:
        words += f"; {_named(late)} did not stop and had to be killed"
    print(words, file=sys.stderr, flush=True)  # noqa: T201 - a launcher says how it ended


def _frozen(
    running: Sequence[RankProcess], ranks: Sequence[RankProcess], hearts: Hearts
) -> list[RankProcess]:
    """Kill the ranks without a heartbeat, if others have ended."""
    if len(running) == len(ranks):
        return []
    return _killed(running, [one.rank for one in running if hearts.silent(one.rank) > SILENT])


def _ended(running: list[RankProcess]) -> list[RankProcess]:
    """Take those that have ended out of the list, and kill what they started and left behind."""
    found = [one for one in running if one.process.poll() is not None]
    for one in found:
        one.kill()
        running.remove(one)
    return found


def _killed(running: Sequence[RankProcess], numbers: Sequence[int]) -> list[RankProcess]:
    """Kill the ranks of these numbers."""
    found = [one for one in running if one.rank in numbers]
    _kill(found)
    return found


def _kill(ranks: Sequence[RankProcess]) -> None:
    for one in ranks:
        one.kill()


def ending(one: RankProcess) -> str:
    """How a process ended: "was killed by SIGKILL"."""
    code = one.process.returncode
    if code >= 0:
        return f"exited with code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def _named(ranks: Sequence[RankProcess]) -> str:
    """As in "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(one.rank) for one in ranks)}"
