"""What `co2analysis tau` prints."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from analysis.convergence.tau import Choice, Timing, best, explain
from co2sim.console.tables import print_table
from co2sim.units import Seconds, duration

Advices = Sequence[tuple[Seconds, Sequence[Choice]]]
"""Times of training, and what every tau gives after each."""


def print_tau(
    out: Console,
    timings: Sequence[Timing],
    advices: Advices,
    target: float | None,
    reached: Sequence[Seconds | None],
    assumed: Sequence[str],
) -> None:
    """Rounds and predicted errors by tau, the best of each time, why, and what is assumed."""
    titles = [_title(timing) for timing in timings]
    alike = len(set(titles)) == 1
    rows = []
    for place, timing in enumerate(timings):
        cells = [_cell(timing, choices) for _, choices in advices]
        if target is not None:
            until = reached[place]
            cells.append("-" if until is None else _time(until))
        head = (f"{timing.tau}", duration(timing.round_time), timing.share)
        rows.append((*head, *cells) if alike else (titles[place], *head, *cells))
    columns = ["tau", "round", "exposed", *(f"bound after {_time(time)}" for time, _ in advices)]
    if target is not None:
        columns.append(f"time to {target:g}")
    title = f"{titles[0]}; * least bound" if alike else "* least bound"
    print_table(out, title, columns if alike else ["rounds", *columns], rows)
    large = [str(timing.tau) for timing in timings if timing.fits_in_memory is False]
    if large:
        which = "" if len(large) == len(timings) else f"tau {', '.join(large)}: "
        note = f"{which}does not fit in the memory of a GPU: shown as if it did\n"
        out.print(note, highlight=False, markup=False)
    for time, choices in advices:
        why = " ".join(explain(choices, _most(timings))) if choices else ""
        words = why or "not even one round fits in"
        out.print(f"after {_time(time)}: {words}\n", highlight=False, markup=False)
    out.print("assumed:", highlight=False)
    for sentence in assumed:
        out.print(f"- {sentence}", highlight=False, markup=False)


def _title(timing: Timing) -> str:
    return f"{timing.workers} workers, averages {timing.lateness} late; rounds {timing.source}"


def _most(timings: Sequence[Timing]) -> int:
    return max(timing.tau for timing in timings)


def tau_to_dict(
    timings: Sequence[Timing],
    advices: Advices,
    reached: Sequence[Seconds | None],
    assumed: Sequence[str],
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
                "why": list(explain(choices, _most(timings))) if choices else [],
            }
            for time, choices in advices
        ],
        "seconds_to_target": list(reached),
        "assumptions": list(assumed),
    }


def _cell(timing: Timing, choices: Sequence[Choice]) -> str:
    """The bound of a row, which is told from others by what it is, not by its tau."""
    for choice in choices:
        if choice.timing is timing:
            return f"{choice.bound.total:.4g}{' *' if choice is best(choices) else '  '}"
    return "-"


def _time(seconds: Seconds) -> str:
    """Hours and days, which `duration` does not have."""
    hours = seconds / 3600
    if hours < 1:
        return duration(seconds)
    return f"{hours:.3g} h" if hours < 240 else f"{hours / 24:.3g} days"  # noqa: PLR2004 - ten days
