"""The plan of the long study: a few lines of the convergence study in trainings of other lengths.

Its tuning goes on from the one at 768 steps. What belongs to a method, such as the outer step and
what is kept, is the best of there. The learning rate of longer runs is the lower of `RATES` for
all; at 3,072 steps it is the better of the two once both were tried with the tuning seed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from convergence_plan import (
    SEEDS,
    TUNING_SEED,
    Ask,
    Configuration,
    StudyBudget,
    configurations,
    wanted,
)
from finished_runs import Known

RUNS = "long_study-runs.csv"
"""The file of finished runs."""

RATES = (5e-3, 1e-2)
"""Between these the learning rate is chosen; the best at 768 steps is one of them for each line."""

COMPARED = ("AdamW-DDP", "LocalSGD 12", "CO2 12, gap", "CO2 delay 1, tau 12, 12 fragments")
LINES = (*COMPARED, "CO2 delay 4, tau 12, 12 fragments")
"""Names of the lines of the convergence study; the last not at all lengths."""

_VALIDATIONS = 8
"""In a run, whatever its length."""


@dataclass(frozen=True, slots=True)
class Part:
    """Runs of one length: which lines, with which seeds, and whether their rate is chosen here."""

    steps: int
    lines: tuple[str, ...]
    seeds: tuple[int, ...]
    tunes: bool = False


@dataclass(frozen=True, slots=True)
class LongStudy:
    """What is run, in this order. `base` is the budget of the convergence study."""

    base: StudyBudget
    parts: tuple[Part, ...]

    @classmethod
    def usual(cls) -> "LongStudy":
        """Lengths of 768 (which the convergence study has run) to 12,288 steps."""
        return cls(
            StudyBudget(),
            (
                Part(768, LINES, SEEDS),
                Part(6144, ("LocalSGD 12", LINES[-1]), (0,)),
                Part(3072, LINES, (0,)),
                Part(6144, ("AdamW-DDP", "CO2 12, gap", COMPARED[-1]), (0,)),
                Part(12288, COMPARED, (0,)),
                Part(3072, COMPARED, (0, 1), tunes=True),
            ),
        )

    @classmethod
    def small(cls) -> "LongStudy":
        """A trial of seconds, too short to mean anything."""
        lines = ("AdamW-DDP", "LocalSGD 12")
        return cls(
            StudyBudget.small(), (Part(24, lines, (0,)), Part(48, lines[1:], (0,), tunes=True))
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Steps of runs, the fewest first."""
        return tuple(sorted({part.steps for part in self.parts}))

    def budget(self, steps: int) -> StudyBudget:
        """The same model, batch and warm-up in a run of so many steps."""
        if steps == self.base.steps:
            return self.base
        return replace(self.base, steps=steps, eval_every=steps // _VALIDATIONS)

    def asks(self, known: Known) -> Iterator[Ask]:
        """All runs, as far as the finished ones tell; those of the base have to be there."""
        for part in self.parts:
            for name in part.lines:
                yield from self._of_line(part, self._best(name, known), known)

    def counted(self, steps: int, name: str, known: Known) -> list[Ask]:
        """The finished runs of a line of one length that count: at the rate that came last."""
        found = {
            ask.key: ask
            for ask in self.asks(known)
            if (ask.budget.steps, ask.configuration.name) == (steps, name)
            and ask.seed != TUNING_SEED
            and ask.key in known
        }
        last = [ask.lr for ask in found.values()][-1:]
        return [ask for ask in found.values() if [ask.lr] == last]

    def tuned(self, known: Known) -> int:
        """Of how many lines all runs to choose the rate by are there."""
        trials = [ask for ask in self.asks(known) if ask.seed == TUNING_SEED]
        lacking = {ask.configuration.name for ask in trials if ask.key not in known}
        return len({ask.configuration.name for ask in trials} - lacking)

    def _best(self, name: str, known: Known) -> Ask:
        """The best of the convergence study."""
        configuration = next(c for c in _all_lines() if c.name == name)
        if self.base.quick:
            return Ask(self.base, configuration, configuration.choices[0], RATES[0], SEEDS[0])
        return list(wanted(configuration, self.base, known))[-1]

    def _of_line(self, part: Part, best: Ask, known: Known) -> Iterator[Ask]:
        ask = replace(best, budget=self.budget(part.steps), lr=min(RATES))
        if part.steps == self.base.steps:
            ask = replace(ask, lr=best.lr)
        elif part.tunes:
            trials = [replace(ask, lr=rate, seed=TUNING_SEED) for rate in RATES]
            yield from trials
            ask = min(trials, key=lambda one: _loss(one, known))
        for seed in part.seeds:
            yield replace(ask, seed=seed)


def _loss(ask: Ask, known: Known) -> float:
    row = known.get(ask.key)
    return float(row["validation_loss"]) if row else float("inf")


def _all_lines() -> list[Configuration]:
    return configurations(StudyBudget())
