"""Time in a lab that runs slower than the cluster that it stands for.

Ranks that share few cores wait for each other's transfers, which those of a cluster do not. So a
lab may have links and kernels that are N times slower than stated, and its clock runs N times
slower, too: what is stated and what is measured fit together again, and cores have N times as long
for a byte. Emulators of networks call this time dilation (Gupta, Yocum, McNett, Snoeren, Vahdat and
Voelker: To Infinity and Beyond: Time-Warped Network Emulation, NSDI 2006).

Deadlines and whatever else concerns the processes of ranks go by the machine's clock.
"""

import math
import os
import time
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

from co2sim.common.errors import OptionError, given
from co2sim.common.units import Seconds

DILATION = "REALRUN_DILATION"
"""Environment variable of the ranks: how many times slower than stated all of their lab is."""

MOST = 100
"""A lab is at most this many times slower."""

SLEEPING = ("realrun", "run")
"""A command whose kernels sleep, unless it says otherwise."""

FLOPS = ("--kernels", "flops")
"""Options of that command whose kernels compute."""

_DIGITS = 9
"""Enough to tell that a number is too large."""

_SLACK = 1.5
"""Cores that a rank needs in real time."""


def factor(name: str, text: str) -> int:
    """A whole number from 1 to `MOST`. Raises OptionError."""
    if not text.isdecimal() or not 1 <= int(text[:_DIGITS]) <= MOST:
        raise OptionError(f"{name} is {given(text)}; it must be a whole number, 1 to {MOST}")
    return int(text)


@cache
def dilation() -> int:
    """What REALRUN_DILATION says, 1 if nothing, read once: a rank stays in its lab.

    Raises OptionError.
    """
    return factor(DILATION, os.environ.get(DILATION, "1"))


def for_cores(ranks: int, cores: int) -> int:
    """How many times slower a lab is to be whose kernels sleep: 1 with 1.5 cores for each rank.

    In labs of 2 nodes of 2 ranks on 2 cores transfers took up to 33 % longer in real time, 12 % in
    labs that were twice as slow, and as long where labs were three times and four times as slow.
    """
    return min(MOST, math.ceil(_SLACK * ranks / cores))


def chosen(text: str, command: Sequence[str], ranks: int, cores: int, sites: int = 1) -> int:
    """What `--dilation` means for a command: a number, or "auto", `for_cores` if kernels sleep.

    Other commands know nothing of it, or compute, and cores are as fast as they are. Links between
    sites are slow already: auto is 1 there, too. A ZeRO-2 over 50 Mbit/s was 3 % longer than
    predicted in real time, and 6 % where the link had a third of that. Raises OptionError.
    """
    if text != "auto":
        return factor("--dilation", text)
    return for_cores(ranks, cores) if _sleeps(command) and sites == 1 else 1


def _sleeps(command: Sequence[str]) -> bool:
    """Whether a command runs kernels that sleep, or none."""
    match list(command):
        case ["realrun", "run", *options]:
            return "--kernels=flops" not in options and FLOPS not in pairwise(options)
        case ["realrun", "probe", *options]:
            return any(option.partition("=")[0] == "--gpu" for option in options)
    return False


def now() -> Seconds:
    """Seconds on the monotonic clock of the cluster that a lab stands for; else of the machine."""
    return time.monotonic() / dilation()


def lasting(seconds: Seconds) -> Seconds:
    """How long these seconds last on the machine."""
    return seconds * dilation()
