"""The page of `co2analysis verify`: the report in sections, with its answer as the heading."""

from collections.abc import Mapping

from analysis.convergence.protocol.checks import Findings
from co2sim.report import markdown
from co2sim.report.page import Page
from co2sim.units import counted


def page(
    findings: Findings, text: str, pictures: Mapping[str, bytes], numbers: str, command: str
) -> Page:
    """The Markdown report `text` with its pictures, and `numbers` as a reader saves them."""
    shown = {name: (content, _seen(name, findings)) for name, content in pictures.items()}
    return Page(
        answer=_answer(findings),
        doubts=list(_doubts(findings)),
        sections=markdown.sections(text, "What must hold", shown),
        commands=[command],
        files={
            "results.json": ("application/json", numbers),
            "report.md": ("text/markdown", text),
        },
    )


def _answer(findings: Findings) -> list[str]:
    grid, checks = findings.grid, findings.checks
    largest = grid.worst[0].ratio if grid.worst else 0.0
    measured = (
        f"{counted(grid.violations, 'violation')} on {grid.configurations:,} distinct"
        f" configurations, and the largest measured mean is {largest:.2f} of its bound"
    )
    failed = sum(not check.passed for check in checks)
    if failed:
        what = f"{failed} of the {len(checks)} checks of CO2's convergence bound fail"
    else:
        what = f"All {len(checks)} checks of CO2's convergence bound hold"
    return [f"{what}: {measured}."]


def _doubts(findings: Findings) -> list[str]:
    """What failed, and what a quick protocol leaves open."""
    found = [f"FAILS: {one.claim} ({one.measured})." for one in findings.checks if not one.passed]
    if findings.quick:
        found.append("This is the quick protocol: fewer cells and seeds than the whole one has.")
    return found


def _seen(name: str, findings: Findings) -> str:
    """What a picture shows, for those who do not see it."""
    grid, oracle, fits = findings.grid, findings.oracle, findings.rates.fits
    if name == "bound.png":
        return (
            f"Left: measured mean squared gradient over its bound, {grid.configurations:,} points,"
            f" of which {grid.violations} lie above the line where both are equal. Right: range,"
            " quartiles and median of measured/bound for each problem. The medians are "
            + ", ".join(f"{family} {group.median:.2f}" for family, group in grid.by_family.items())
        )
    if name == "rates.png":
        terms = ", ".join(f"{fit.family} {fit.coefficients[3]:.3f}" for fit in fits)
        return (
            "The exact mean squared gradient falls as the outer rounds T grow, for tau = 1, 4, 16"
            " and 64, and lies on the fit of four terms. Coefficients of G tau/T by problem and"
            f" beta: {terms}"
        )
    if name == "rescue.png":
        return (
            "Mean squared gradient over that at the start, by gamma L tau, a line for each rule of"
            " penalty and clipping: CO2 above, SlowMo below, a column for each problem. The tables"
            " below the picture hold its values"
        )
    return (
        f"Left: a histogram of {len(oracle.scores)} z of simulated against exact moments beside the"
        f" normal distribution; the largest is {oracle.largest_score:.2f}. Right: measured edges of"
        f" stability on the exact lines; the largest distance is {oracle.largest_edge_error:.0e}"
    )
