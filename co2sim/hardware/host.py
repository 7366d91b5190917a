"""What a machine adds that serves all ranks itself: measured in laboratories, not in clusters."""

from dataclasses import dataclass

from co2sim.common.errors import OptionError
from co2sim.common.units import Seconds
from co2sim.common.validation import Bandwidth, Between, Size, Slowdown, Time, check

FULLY_IDLE: Seconds = 5e-3
"""After so long a pause cores take as long to wake up as after any longer one."""


@dataclass(frozen=True, slots=True)
class TokenBucket:
    """The burst of a shaped link: `size` bytes, counted as the bandwidth of the link is.

    They pass at once after a pause, or at `bandwidth` where cores are slow. What is longer than a
    burst loses `lag` of its further time, until it has lost what the burst gained.
    """

    size: Size
    bandwidth: Bandwidth | None = None
    lag: Slowdown = 0.0

    def __post_init__(self) -> None:
        """Refuse what no shaper can be."""
        check(self, "burst")


@dataclass(frozen=True, slots=True)
class Calls:
    """What cores add to a collective of each kind, on top of the `call_overhead` of all.

    Kinds are implemented differently: some sum up, some exchange more messages.
    """

    all_reduce: Time = 0.0
    reduce_scatter: Time = 0.0
    all_gather: Time = 0.0
    all_to_all: Time = 0.0

    def __post_init__(self) -> None:
        """Refuse what no time can be."""
        check(self, "calls")


@dataclass(frozen=True, slots=True)
class HostEffects:
    """What the cores of a machine do to collectives and computes.

    `one_machine`: all nodes are one machine, whose cores serve all collectives. Those in flight at
    once share what their latencies take of it, and the first after a pause of `fully_idle` takes
    `wake_up` longer. `one_core`: the streams of a rank share a core; those that also communicate go
    first. `call_interference` is what each collective takes from the compute beside it as it
    starts. `intra`, `inter` and `wan` are the bursts of these links.
    """

    one_machine: bool = False
    one_core: bool = False
    wake_up: Time = 0.0
    fully_idle: Between = FULLY_IDLE
    call_interference: Time = 0.0
    calls: Calls | None = None
    intra: TokenBucket | None = None
    inter: TokenBucket | None = None
    wan: TokenBucket | None = None

    def __post_init__(self) -> None:
        """Refuse what no machine can be."""
        check(self, "host")
        if self.wake_up and not self.one_machine:
            raise OptionError(
                f"host: wake_up is {self.wake_up:g} s, which is simulated only with one_machine ="
                " true"
            )

    @property
    def depends_on_others(self) -> bool:
        """Whether an op takes longer or shorter by what else runs: `calls` alone do not do that."""
        bursts = self.intra, self.inter, self.wan
        return self.one_machine or self.one_core or self.call_interference > 0 or any(bursts)
