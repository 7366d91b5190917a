"""What `realrun train --estimate` prints."""

from pathlib import Path

from co2sim.common.tables import console, print_lines, print_table
from co2sim.common.units import counted
from realrun.train.constants import Estimates, Point, commands, limits
from realrun.train.folder import ESTIMATE
from realrun.train.log import History


def print_estimates(history: History, out: Path) -> None:
    """The constants at every point, those for the bound, and the commands that take them."""
    found = history.estimates
    assert found is not None
    shown, points = console(), found.points
    print_lines(shown, "")
    print_table(
        shown,
        f"constants of the bound: {counted(found.workers, 'worker')} with"
        f" {counted(found.samples, 'sample')} in a batch, {len(points[0].losses)} batches at each"
        " point; ± standard error",
        ("", *(f"after step {point.step}" for point in points), "for the bound"),
        _rows(found),
    )
    print_lines(shown, *limits(history.settings))
    lines = commands(found, history.chosen, history.rows[-1].delay)
    print("\nWith the CLUSTER and the MODEL that you ask about:\n")  # whole lines, to copy
    print("\n".join(f"$ {line}" for line in lines.values()))
    print(f"\nestimates  {out / ESTIMATE}")


def _rows(found: Estimates) -> list[tuple[str, ...]]:
    def row(name: str, cells: list[str], chosen: str = "") -> tuple[str, ...]:
        return (name, *cells, chosen)

    points = found.points
    return [
        row("loss; gap", [f"{p.loss}" for p in points], f"{found.gap}"),
        row("|grad f|^2", [f"{p.gradient.floored}" for p in points]),
        row("noise sigma^2", [f"{p.noise}" for p in points], f"{found.noise}"),
        row(
            "heterogeneity zeta^2",
            [f"{p.heterogeneity.floored}" for p in points],
            f"{found.heterogeneity}",
        ),
        row(
            "L: largest |eigenvalue|",
            [f"{p.curvature:.4g}" for p in points],
            f"{found.smoothness:.4g}",
        ),
        row("L: iterations, last change", [_iterations(p) for p in points]),
        row("L: on other samples", [f"{p.elsewhere}" for p in points]),
        row("L: along the next step", [_along(p) for p in points]),
    ]


def _iterations(point: Point) -> str:
    return f"{point.iterations}, {point.change:.1%}"


def _along(point: Point) -> str:
    return "-" if point.along_step is None else f"{point.along_step:.4g}"
