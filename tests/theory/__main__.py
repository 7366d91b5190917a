"""Measure and judge the whole protocol, and write report.md: PYTHONPATH=tests python -m theory.

After an interruption the same command continues. Exit code 1 if a claim fails.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from analysis.convergence.bound import TERMS
from co2sim.common.plots import COLOURS, GRID, STYLE, render
from theory import clipping, controls, fragments, grid, oracle
from theory.cells import Cells, Check, table

LAYERS = {
    "oracle": oracle.checks,
    "grid": grid.checks,
    "controls": controls.checks,
    "clipping": clipping.checks,
    "fragments": fragments.checks,
}


def report(cells: Cells, *, quick: bool) -> tuple[str, bool]:
    """All claims and tables as Markdown, and whether every claim holds."""
    lines = [line for checks in LAYERS.values() for line in checks(cells, quick=quick)]
    holds = {True: "holds", False: "FAILS"}
    claims = [line for line in lines if isinstance(line, Check)]
    rows = [
        [cell.replace("|", "\\|") for cell in (each.claim, holds[each.passed], each.measured)]
        for each in claims
    ]
    tables = [f"## {line[0].upper()}{line[1:]}" for line in lines if isinstance(line, str)]
    title = "# The convergence bounds of CO2, checked"
    first = table(("must hold", "", "measured"), rows)
    line = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(line, capture_output=True, text=True, check=False).stdout.strip()
    made = f"Made by `make verify` at commit {commit or 'unknown'}."
    return "\n\n".join((title, first, *tables, made)) + "\n", all(each.passed for each in claims)


def picture(cells: Cells, *, quick: bool) -> bytes:
    """Measured against bound by its largest term, of averages that are late by rounds; as PNG."""
    rows = [row for row in grid.distinct(grid.measured(cells, quick=quick)) if not row.setting.late]
    with mpl.rc_context(STYLE | GRID):
        figure = Figure(figsize=(6.0, 5.0), layout="constrained")
        axis = figure.subplots()
        for name, colour in zip(TERMS, COLOURS, strict=False):
            points = [(r.total, r.measured) for r in rows if grid.dominant(r) == name]
            label = f"{name} ({len(points):,})"
            axis.plot(*zip(*points, strict=True), "o", color=colour, ms=2, mew=0, label=label)
        ends = np.array([[f(row.total for row in rows)] * 2 for f in (min, max)])
        axis.plot(*ends.T, color="black", lw=1)
        axis.set(xscale="log", yscale="log", xlabel="bound", ylabel="measured mean of |grad f|²")
        axis.set_title(f"{len(rows):,} configurations; none may be above the line", loc="left")
        axis.legend(title="largest term of the bound", markerscale=3)
        return render(figure, "png")


def main() -> int:
    """Write the report and print its claims."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/verify"), help="folder of the report")
    parser.add_argument("--quick", action="store_true", help="fewer cells: half a minute")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    chosen = parser.parse_args()
    cells = Cells(chosen.out / "cells", chosen.jobs)
    text, passed = report(cells, quick=chosen.quick)
    (chosen.out / "report.md").write_text(text)
    (chosen.out / "bound.png").write_bytes(picture(cells, quick=chosen.quick))
    print(text)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
