"""The part of the report about the bound against measurement, and about what would be noticed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from analysis.convergence.bound import TERMS
from analysis.convergence.pages import Block, Heading, Picture, Table, Text
from analysis.convergence.protocol.tightness import FACTORS, LATE, margin


def grid_blocks(grid: Mapping[str, Any]) -> Iterator[Block]:
    """The bound against measurement: tables by problem, term, penalty and delay."""
    yield Heading("Bound against measurement")
    yield Picture("bound.png", "Measured mean squared gradient against the bound")
    yield Text(
        "Inner steps are 10, 50 and 95 % of the largest feasible one (2 to 95 % for runs that"
        " begin at a minimum). A configuration passes if the measured mean plus a margin is at most"
        " the bound: three standard errors where the seeds are many, and as many more as Student's"
        f" t asks for where they are few ({margin(8):.2f} for 8). In families called exact the mean"
        " comes from the oracle, without sampling. Penalties are constant, or follow the gap-aware"
        " rule in [1, 1 + 1/(1 - beta)]; delay 0 is SlowMo or local SGD, 1 is CO2. Settings that"
        " are the same run (without noise any G; with one local step any alpha and Lambda of the"
        " same virtual step) count once. "
        + (
            f"{grid['resampled']:,} configurations whose mean plus margin exceeded the bound were"
            f" decided by fresh runs with more seeds, up to {grid['most_seeds']:,}."
            if grid["resampled"]
            else "No configuration needed more seeds than the table states."
        )
    )
    yield Text(
        "zeta² is exact for families that bound it. For quadratics that differ and for logistic"
        " regression by label it has no bound: there it is the largest mean over seeds that any"
        " step of the same run met: an estimate in simulated families, exact in those called exact."
    )
    yield Text(_tightness(grid))
    for title, key in (
        ("problem", "by_family"),
        ("largest term of the bound", "by_term"),
        ("penalty", "by_penalty"),
        ("delay", "by_delay"),
    ):
        rows = [
            [
                name,
                f"{line['configurations']:,}",
                f"{line['violations']}",
                f"{line['median']:.3f}",
                f"{line['largest']:.3f}",
                _seeds(line),
            ]
            for name, line in grid[key].items()
        ]
        yield Table(
            [title, "configurations", "violations", "median measured/bound", "largest", "seeds"],
            rows,
        )
    yield Heading("Tightest configurations", 3)
    yield _configurations(grid["worst"])
    if grid["violating"]:
        yield Heading("Violations", 3)
        yield _configurations(grid["violating"])
    published = grid["published"]
    if published["asked"]:
        yield Text(
            f"SlowMo's own theorem prescribes its step and a long horizon: of the"
            f" {published['asked']} settings with delay 0 and no penalty in the grid it is silent"
            f" on {published['silent']}."
        )


def _tightness(grid: Mapping[str, Any]) -> str:
    """What the largest ratios are, in words."""
    best = grid["worst"][0]
    terms = ", ".join(f"{name} {line['largest']:.2f}" for name, line in grid["by_term"].items())
    kind = "without noise" if best["noise"] == 0 else f"with sigma² = {best['noise']:g}"
    return (
        f"What the tightness comes from: the largest ratio, {best['ratio']:.3f}, is a run {kind}"
        f" with tau = {best['tau']}, delay {best['delay']} and beta = {best['beta']:g} on"
        f" {best['family']}: {'delayed ' if best['delay'] else ''}gradient descent. It says little"
        " about other terms. The largest ratio where one term dominates the bound:"
        f" {terms}."
    )


def _seeds(line: Mapping[str, Any]) -> str:
    least, most = line["least_seeds"], line["most_seeds"]
    if most == 0:
        return "exact"
    low = "exact" if least == 0 else f"{least:,}"
    return low if least == most else f"{low} to {most:,}"


def _configurations(lines: Sequence[Mapping[str, Any]]) -> Table:
    names = ("family", "delay", "penalty", "G", "tau", "T", "alpha", "beta", "gamma", "noise")
    rows = [
        [short(line[n]) for n in (*names, "measured", "error", "bound", "ratio")] for line in lines
    ]
    return Table([*names[:-1], "sigma²", "measured", "s.e.", "bound", "ratio"], rows)


def term_blocks(grid: Mapping[str, Any], alone: Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    """What every term covers, and how wrong it could be without being noticed."""
    yield Heading("Each term alone")
    yield Text(
        "On quadratics the parts of the measured value can be told apart exactly: without noise,"
        " without a start, with and without delay, at the optimum of workers that differ. This is"
        " each part beside the term that covers it, without momentum and penalty."
    )
    by: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for line in alone:
        if line["ratio"] is not None:
            by.setdefault((line["term"], line["fraction"]), []).append(line)
    rows = [
        [term, f"{fraction:g}", *(_ratio(lines, tau) for tau in (1, 4, 16))]
        for (term, fraction), lines in by.items()
    ]
    yield Table(
        ["term", "of the largest gamma", *(f"part/term, tau = {tau}" for tau in (1, 4, 16))],
        sorted(rows, key=lambda row: row[0]),
    )
    yield Heading("How blind the check is", 3)
    every, usual = grid["noticed"], grid["noticed_usually"]
    yield Text(
        "Every part of the bound in turn is multiplied by a factor; violations begin where the"
        " factor falls below the one given here. The runs at a minimum are in the grid for this:"
        " there noise, staleness or drift is all there is. On the other runs alone the same errors"
        " would pass much longer. 'Never' means that the part could be missing: the room that other"
        " terms have covers it."
    )
    rows = [
        [
            name,
            _begins(line),
            _begins(usual[name]),
            *(f"{line['violations'][f'{factor:g}']:,}" for factor in FACTORS),
        ]
        for name, line in every.items()
    ]
    yield Table(
        [
            *("part", "violations begin below", "without the runs at a minimum"),
            *(f"violations at {factor:g}" for factor in FACTORS),
        ],
        rows,
    )
    yield Text(_blindness(every, usual))


def _begins(line: Mapping[str, Any]) -> str:
    return f"x {line['begins']:.3f}" if line["begins"] > 0 else "never"


def _blindness(every: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """What errors would pass, in words."""
    passing = [
        f"the {name} term {1 / every[name]['begins']:.2g} times too small"
        for name in TERMS
        if every[name]["begins"] > 0
    ]
    unseen = [name for name in every if every[name]["begins"] <= 0]
    words = f"What would pass: {', '.join(passing)}."
    if unseen:
        words += (
            f" An error of x 10 or of any other size in these would pass unnoticed:"
            f" {', '.join(unseen)}."
        )
    usually = [name for name in TERMS if usual[name]["begins"] <= 0]
    if usually:
        words += (
            f" On the runs that do not begin at a minimum {' and '.join(usually)} could be missing."
        )
    return words + (
        " What is seen of staleness is the part of an outer step unlike gamma; the part of delay"
        " and momentum stays below the room in the noise term in every run here."
        if every[LATE]["begins"] <= 0 < every["staleness"]["begins"]
        else ""
    )


def _ratio(lines: Sequence[Mapping[str, Any]], tau: int) -> str:
    return next((f"{line['ratio']:.3f}" for line in lines if line["tau"] == tau), "-")


def short(value: Any) -> str:
    """Three digits of a number."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
