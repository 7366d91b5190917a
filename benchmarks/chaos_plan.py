"""What is tried: faults and the commands that they hit, drawn from a seed."""

import random
from dataclasses import dataclass

TRAINED = (
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "zeropp",
    "fsdp",
    "local_sgd:tau=4",
    "slowmo:tau=4",
    "diloco:tau=4",
    "diloco:tau=4,fragments=2,delay=2",
    "overlap_local_sgd:tau=4",
    "co2:tau=4",
    "co2:tau=4,delay=2,fragments=2",
)
_FEW = ("fsdp", "co2:tau=4")
"""Strategies of the short campaign: one that shares gradients, and one of local updates."""

_RANK = ("kill", "stop", "pause", "slow")
_LAUNCHER = (
    "launcher killed",
    "launcher stopped",
    "launcher paused",
    "SIGTERM",
    "SIGINT",
)
_DISK = ("full disk", "read-only folder")
DAMAGE = ("truncated", "deleted", "bit flipped")
_NETWORK = ("network cut", "network away", "rate drop")
_JOB = ("kill", "pause", "slow", "launcher killed", "launcher paused", "SIGTERM", "SIGINT")

STUDIES = ("sweep", "explore --out", "explore")
"""Targets without ranks: their processes simulate."""

FAULTS = {
    "run": (*_RANK, "raise", *_LAUNCHER, *_DISK, "clock jump"),
    "train": (*_RANK, "raise", *_LAUNCHER, *_DISK, *DAMAGE, *DAMAGE, "clock jump"),
    "lab run": (*_RANK, *_LAUNCHER, *_NETWORK),
    "lab train": (*_RANK, *_LAUNCHER, *_NETWORK),
    "sweep": (*_JOB, *_DISK),
    "explore --out": (*_JOB, *_DISK),
    "explore": _JOB,
}
"""Faults by target. "pause" is a stop that ends in time, "network away" a cut that does."""

_SHARES = {
    "run": 24,
    "train": 44,
    "lab run": 5,
    "lab train": 5,
    "sweep": 7,
    "explore --out": 3,
    "explore": 4,
}
_PLAIN = 0.06
"""Of trials whose ranks could be forked, the share whose ranks are not."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One command, and what befalls it `when` a share of its usual time has passed.

    `victim` is the rank, or the place among processes; `amount` is from 0 to 1 and says how long or
    how much.
    """

    number: int
    target: str
    strategy: str
    ranks: int
    fault: str
    when: float
    victim: int
    amount: float
    error: str
    plain: bool
    seed: int

    @property
    def trains(self) -> bool:
        """Whether there are checkpoints, and a state that can be compared."""
        return self.target in {"train", "lab train"}

    @property
    def in_lab(self) -> bool:
        """Whether it needs root."""
        return self.target.startswith("lab")

    @property
    def name(self) -> str:
        """Of the undisturbed run that it is compared with."""
        words = f"{self.target} {self.strategy} {self.ranks}"
        return "".join(one if one.isalnum() else "-" for one in words)


def drawn(seed: int, count: int, *, few: bool = False) -> list[Trial]:
    """The trials of a seed: the first `count`, which do not depend on how many there are.

    With `few` strategies they share the runs that nothing befalls.
    """
    return [_trial(seed, number, _FEW if few else TRAINED) for number in range(count)]


def _trial(seed: int, number: int, strategies: tuple[str, ...]) -> Trial:
    rng = random.Random(f"{seed} {number}")  # noqa: S311 - repeatable, not secret
    # In turn, so that few trials hit all targets; each run through them in another order.
    order = [name for name, share in _SHARES.items() for _ in range(share)]
    random.Random(f"{seed} {number // len(order)}").shuffle(order)  # noqa: S311
    target = order[number % len(order)]
    strategy = rng.choice(strategies)
    ranks = rng.choice((2, 2, 2, 3, 3, 4))  # a batch of 12 divides by all of them
    if target.startswith("lab") or strategies is _FEW:
        ranks = 2
    if target in STUDIES:
        strategy, ranks = "", 1
    fault = rng.choice(FAULTS[target])
    return Trial(
        number,
        target,
        strategy,
        ranks,
        fault,
        when=rng.random(),
        victim=rng.randrange(ranks if ranks > 1 else 8),
        amount=rng.random(),
        error=rng.choice(("RuntimeError", "MemoryError", "ValueError")),
        plain=rng.random() < _PLAIN and fault not in {"raise", "clock jump"},
        seed=rng.randrange(2**32),
    )
