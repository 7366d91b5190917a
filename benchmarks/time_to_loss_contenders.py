"""Who is compared in `time_to_loss.py`, and what was tuned for each. Needs no torch."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
from convergence_plan import split

TAU = 12


@dataclass(frozen=True, slots=True)
class Contender:
    """A method with what was tuned for it.

    `strategy` is the one of co2sim whose schedule it has. `lines` are the names, or how they begin,
    of its lines in convergence.csv; the best of them gives lr and outer step in the place of these.
    Where co2sim chooses a number it is a pattern that finds tau or the delay; the nearest counts.
    `peer` is the method of torch or torchft, if it is one of those that `realrun train` has not.
    """

    name: str
    strategy: str
    lines: str
    lr: float
    outer: str = ""
    peer: str = ""

    @property
    def measures_delay(self) -> bool:
        """Whether training chooses a delay."""
        return "delay=auto" in self.strategy

    @property
    def in_ddp(self) -> bool:
        """Whether the model is wrapped in DistributedDataParallel."""
        return self.strategy == "ddp" or self.peer == "torch post-local SGD"

    @property
    def tensor_by_tensor(self) -> bool:
        """Whether every tensor is averaged by itself."""
        return self.peer == "torchft LocalSGD"

    @property
    def calibrates(self) -> bool:
        """Whether it is none of those that are compared."""
        return not self.lines


_LOCAL, _DILOCO = f"local_sgd:tau={TAU}", f"diloco:tau={TAU}"
_NESTEROV = "momentum=0.5,lr=1"
CONTENDERS = (
    Contender("torch DDP", "ddp", "AdamW-DDP", 1e-2),
    Contender("torch post-local SGD", _LOCAL, "LocalSGD 12", 1e-2, peer="torch post-local SGD"),
    Contender("LocalSGD", _LOCAL, "LocalSGD 12", 1e-2),
    Contender("SlowMo", f"slowmo:tau={TAU}", "SlowMo 12", 5e-3, "momentum=0.2,lr=1"),
    Contender("DiLoCo", _DILOCO, "DiLoCo 12", 5e-3, _NESTEROV),
    Contender(
        "Streaming DiLoCo",
        f"{_DILOCO},fragments=3,delay=4",
        "Streaming DiLoCo delay 4, tau 12",
        5e-3,
        _NESTEROV,
    ),
    Contender("torchft LocalSGD", _LOCAL, "LocalSGD 12", 1e-2, peer="torchft LocalSGD"),
    Contender("torchft DiLoCo", _DILOCO, "DiLoCo 12", 5e-3, _NESTEROV, peer="torchft DiLoCo"),
    Contender(
        "CO2 as published", f"co2:tau={TAU}", "CO2 12, ", 1e-2, "momentum=0,lr=0.5,gap=gap_aware"
    ),
    Contender(
        "CO2, delay auto",
        f"co2:tau={TAU},delay=auto",
        rf"CO2 delay (\d+), tau {TAU}(?:, \d+ fragments)?",
        1e-2,
        "keep=0.5,predict=0.5",
    ),
    Contender(
        "CO2, tau and delay auto",
        "co2:tau=auto,delay=auto",
        r"CO2 delay \d+, tau (\d+)(?:, \d+ fragments)?",
        1e-2,
        "keep=1",
    ),
)
"""With the learning rates and outer steps to take where convergence.csv has none.

Those of Streaming DiLoCo are DiLoCo's, CO2 with a delay has the other CO2's learning rate and a
gain of 1; in short rounds all progress is kept.
"""


REFERENCE = "CO2 as published"
"""The one that is expected to end with the highest loss."""


def contenders(
    only: Collection[str], results: Path, choose: Callable[[Contender], tuple[Contender, int]]
) -> list[Contender]:
    """What is compared, with the best line of convergence.csv for each.

    `only`: of these names, if there are any. `choose` gives a contender with a number for tau, and
    the number that its lines are compared by.
    """
    path = results / "convergence.csv"
    frame = pd.read_csv(path, keep_default_na=False) if path.exists() else pd.DataFrame()
    chosen = [one for one in CONTENDERS if not only or one.name in only]
    return [_tuned(*choose(entry), frame) for entry in chosen if installed(entry)]


def installed(entry: Contender) -> bool:
    """Whether it can be run here."""
    return not entry.peer.startswith("torchft") or find_spec("torchft") is not None


def _tuned(entry: Contender, number: int, frame: pd.DataFrame) -> Contender:
    lr, outer = entry.lr, entry.outer
    if len(frame):
        if entry.measures_delay:
            found = frame["configuration"].str.extract(f"^{entry.lines}$")[0].dropna()
            lines = frame.loc[(found.astype(int) - number).abs().sort_values(kind="stable").index]
        else:
            lines = frame[frame["configuration"].str.startswith(entry.lines)].sort_values("loss")
        if len(lines):
            lr, outer = float(lines.iloc[0]["lr"]), str(lines.iloc[0]["outer"])
    if entry.measures_delay:  # what is kept is part of the strategy
        kept, outer = split(outer)
        return replace(entry, strategy=f"{entry.strategy},{kept}", lr=lr, outer=outer)
    return replace(entry, lr=lr, outer=outer)


NEVER = 10_000
"""Steps of a round that does not end."""

_STEPS_ALONE = f"local_sgd:tau={NEVER}"
ALONE = Contender("calibration: nothing is sent", _STEPS_ALONE, "", 5e-3)
IN_DDP = Contender("calibration: DDP that sends nothing", _STEPS_ALONE, "", 5e-3, peer="DDP alone")
SENDING = Contender("calibration: always sending", _STEPS_ALONE, "", 5e-3, peer="sending")
AVERAGING = Contender("calibration: an average after each step", "local_sgd:tau=1", "", 5e-3)
SMALL_AVERAGES = Contender(
    "calibration: messages of torchft", _LOCAL, "", 5e-3, peer="torchft small"
)
CALIBRATIONS = (ALONE, IN_DDP, SENDING, AVERAGING)
"""How long local steps take where the ranks share the cores: the bare model's, torch's, and while
the network is busy all the time. The last tells how long a blocking average takes there. Before
torchft's LocalSGD comes `SMALL_AVERAGES`: as many tensors as the model has, so small that their
bytes take no time, and large enough for every message: Gloo sends none for an empty segment."""


def calibrations(chosen: Collection[Contender]) -> list[Contender]:
    """What is measured before these run, in this order."""
    small = [SMALL_AVERAGES] if any(entry.tensor_by_tensor for entry in chosen) else []
    return list(dict.fromkeys([*CALIBRATIONS, *small, *map(alone, chosen)]))


def alone(entry: Contender) -> Contender:
    """The calibration whose step is the local step of a contender.

    CO2 with a delay, whose rounds may be short, runs itself, with workers that average with nobody.
    """
    if entry.in_ddp:
        return IN_DDP
    if entry.measures_delay:
        return replace(entry, name=f"calibration: {entry.name}, alone", lines="", peer="alone")
    return ALONE
