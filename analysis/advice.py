"""What `co2analysis tau` prints."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from analysis.tau import ASSUMPTIONS, Choice, Timing, best, explain
from co2sim.cli.report import print_table
from co2sim.units import Seconds, duration

Advices = Sequence[tuple[Seconds, Sequence[Choice]]]
"""Times of training, and what every tau gives after each."""


def print_tau(
    out: Console,
    timings: Sequence[Timing],
    advices: Advices,
    target: float | None,
    reached: Sequence[Seconds | None],
) -> None:
    """Rounds and predicted errors by tau, the best of each time, why, and what is assumed."""
    by_tau = [{choice.timing.tau: choice for choice in choices} for _, choices in advices]
    winners = [best(choices).timing.tau if choices else None for _, choices in advices]
    rows = []
    for place, timing in enumerate(timings):
        cells = [
            _total(known.get(timing.tau), best_one=winner == timing.tau)
            for known, winner in zip(by_tau, winners, strict=True)
        ]
        if target is not None:
            until = reached[place]
            cells.append("-" if until is None else _time(until))
        exposed = timing.exposed / timing.round_time
        rows.append((f"{timing.tau}", duration(timing.round_time), f"{exposed:.1%}", *cells))
    columns = ["tau", "round", "exposed", *(f"bound after {_time(time)}" for time, _ in advices)]
    if target is not None:
        columns.append(f"time to {target:g}")
    first = timings[0]
    sources = ", ".join(dict.fromkeys(timing.source for timing in timings))
    title = (
        f"{first.workers} workers, averages {first.delay} rounds late; rounds {sources}; * least"
    )
    print_table(out, title, columns, rows)
    for time, choices in advices:
        words = " ".join(explain(choices)) if choices else "not even one round fits in"
        out.print(f"after {_time(time)}: {words}\n", highlight=False, markup=False)
    out.print("assumed:", highlight=False)
    for sentence in ASSUMPTIONS:
        out.print(f"- {sentence}", highlight=False, markup=False)


def tau_to_dict(
    timings: Sequence[Timing], advices: Advices, reached: Sequence[Seconds | None]
) -> dict[str, Any]:
    """The same as plain values."""
    return {
        "timings": [asdict(timing) for timing in timings],
        "after": [
            {
                "seconds": time,
                "best_tau": best(choices).timing.tau if choices else None,
                "choices": [
                    {
                        "tau": choice.timing.tau,
                        "rounds": choice.rounds,
                        "inner_step": choice.inner_step,
                        "bound": {**asdict(choice.bound), "total": choice.bound.total},
                    }
                    for choice in choices
                ],
                "why": list(explain(choices)) if choices else [],
            }
            for time, choices in advices
        ],
        "seconds_to_target": list(reached),
        "assumptions": list(ASSUMPTIONS),
    }


def _total(choice: Choice | None, *, best_one: bool) -> str:
    if choice is None:
        return "-"
    return f"{choice.bound.total:.4g}{' *' if best_one else '  '}"


def _time(seconds: Seconds) -> str:
    """Hours and days, which `duration` does not have."""
    hours = seconds / 3600
    if hours < 1:
        return duration(seconds)
    return f"{hours:.3g} h" if hours < 48 else f"{hours / 24:.3g} days"  # noqa: PLR2004 - two days
