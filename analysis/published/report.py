"""The report of `co2analysis validate` as Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from analysis.published.ablation import Mechanism
from analysis.published.consistency import Least, Speeds
from analysis.published.diagnosis import Alike, Otherwise, Remedy, Shares
from analysis.published.errors import Row, Summary
from analysis.published.paper_cells import Unpredicted
from analysis.published.parameters import GROUPS, Constant, cluster_of, stated
from analysis.published.sensitivity import Refitted
from co2sim.units import duration

_CLUSTERS = {
    "v100-zeropp": "dgx2-calibrated",
    "a100-data-parallel": "a100-node-calibrated",
    "a100-co2": "a100-tcp80-calibrated",
}
"""Where each group's constants are in use."""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table; the first `left` columns are texts."""
    rule = ["---"] * left + ["---:"] * (len(columns) - left)
    lines = [columns, rule, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def number(value: float) -> str:
    """Four significant figures, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"  # noqa: PLR2004


def percent(value: float) -> str:
    """Signed, in percent."""
    return f"{value:+.1%}"


def summary_table(found: Mapping[tuple[str, str, str], Summary]) -> str:
    """Errors per source, use and strategy."""
    rows = [
        (
            source,
            use,
            strategy,
            str(item.cells),
            f"{item.mape:.1%}",
            percent(item.bias),
            f"{percent(item.worst.error)}: {item.worst.cell.name}",
            "-" if item.inside is None else f"{item.inside:.0%}",
        )
        for (source, use, strategy), item in found.items()
    ]
    columns = (
        *("source", "use", "strategy", "cells", "MAPE", "bias"),
        *("largest error", "in 90 % interval"),
    )
    return table(columns, rows, 3)


def cell_table(rows: Iterable[Row]) -> str:
    """Every cell."""
    found = [
        (
            row.cell.source,
            row.cell.name,
            row.cell.use,
            number(row.cell.published),
            number(row.predicted),
            percent(row.error),
            f"{number(row.low)} to {number(row.high)}" if row.has_interval else "-",
        )
        for row in rows
    ]
    columns = ("source", "cell", "use", "published", "predicted", "error", "90 % interval")
    return table(columns, found, 3)


def at_bound(constant: Constant, value: float) -> str:
    """A value of a constant, and whether it is at a bound."""
    return constant.shown(value) + (" (at bound)" if constant.at_bound(value) else "")


def constants_of(entries: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The fitted constants with their 90 % confidence intervals."""
    found = []
    for name, entry in entries.items():
        group = GROUPS[name]
        values = stated(group, cluster_of(_CLUSTERS[name], ()))
        for place, constant in enumerate(group.constants):
            half = entry["interval_factor"] * entry["covariance"][place][place] ** 0.5
            value = values[constant.name]
            low, high = max(constant.low, value - half), min(constant.high, value + half)
            found.append(
                {
                    "group": name,
                    "generation": group.generation,
                    "constant": constant.name,
                    "means": constant.means,
                    "value": value,
                    "low": low,
                    "high": high,
                    "bounds": (constant.low, constant.high),
                    "shown": at_bound(constant, value),
                    "interval": f"{at_bound(constant, low)} to {at_bound(constant, high)}",
                }
            )
    return found


def constant_table(found: Iterable[Mapping[str, Any]]) -> str:
    """The same as a table."""
    rows = [
        (item["generation"], item["constant"], item["means"], item["shown"], item["interval"])
        for item in found
    ]
    columns = ("generation", "constant", "what it is", "value", "90 % confidence")
    return table(columns, rows, 3)


def ablation_table(found: Iterable[tuple[Mechanism, float, float]]) -> str:
    """Errors with and without every mechanism."""
    rows = [
        (mechanism.group, mechanism.name, f"{before:.1%}", f"{after:.1%}")
        for mechanism, before, after in found
    ]
    columns = ("cells", "mechanism left out", "MAPE with it, fit and check cells", "without")
    return table(columns, rows, 2)


def fit_table(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """How well every group was fitted, and where the scatter behind its intervals is from."""
    rows = []
    for name, entry in entries.items():
        held, left = entry.get("cross_validated"), entry.get("left_out", {}).items()
        rows.append(
            (
                name,
                entry.get("assumed", "scatter: that of its own fit"),
                str(entry["cells"]),
                f"{entry['mape']:.1%}",
                "-" if held is None else f"{held:.1%}",
                ", ".join(f"{label.replace('_', ' ')} {error:.1%}" for label, error in left) or "-",
                f"{entry['scatter']:.1%}",
            )
        )
    columns = (
        *("group", "intervals from", "fit cells", "MAPE of the fit"),
        *("cross-validated", "with one value of a label left out", "scatter"),
    )
    return table(columns, rows, 2)


def refit_table(found: Mapping[str, Refitted], what: str) -> str:
    """Constants and errors of CO2's check cells under several assumptions."""
    first = next(iter(found.values()))
    rows = [
        (
            name,
            *(f"{value:.3f}" for value in item.values.values()),
            f"missed by {percent(item.missed)}" if item.missed else "met",
            *(percent(error) for error in item.errors.values()),
        )
        for name, item in found.items()
    ]
    return table((what, *first.values, "fit cells", *first.errors), rows, 1)


def speeds_text(found: Speeds) -> str:
    """What a ratio near 1 says of the scatter of published runs."""
    small, large = found.small / found.single - 1, found.large / found.single - 1
    gpus = [terms[0].setup.gpus for terms in (found.cell.over, found.cell.terms)]
    return (
        f"**{found.cell.name}**, without a simulator: a single node does {found.single:,.0f}"
        f" tokens/s per GPU. The published throughput on {gpus[1]} GPUs is {found.large:,.0f} per"
        f" GPU ({percent(large)}), and by the published ratio that on {gpus[0]} was"
        f" {found.small:,.0f} ({percent(small)}). Where all that leaves a node is hidden, as the"
        " model has it, the three are equal but for the work of the outer step: so far do published"
        " runs scatter.\n"
    )


def consistency_text(found: Least) -> str:
    """What the cells of throughput say of a ratio that is lower than they leave room for."""
    return (
        f"**{found.cell.name}**, without a simulator: suppose that all runs had equal tokens per"
        " GPU and step, that no GPU was faster than the fastest published, and that the average of"
        " a round took no longer than a whole published step of `zero2` on as many GPUs, and hid"
        f" behind the steps. Then the ratio would be at least {found.least:.3f}, whatever the rate"
        f" of the network. The published {number(found.cell.published)} says that a round took at"
        f" least {found.stretch:.1%} longer than such a step, computation included, or that tokens"
        " differed: the average sent more than `zero2` does, was slower, or was not hidden.\n"
    )


def unpredicted_table(found: Iterable[Unpredicted]) -> str:
    """Published cells that are not predicted, with the reason."""
    rows = [(cell.source, cell.name, cell.reason, number(cell.published)) for cell in found]
    return table(("source", "cell", "why not", "published"), rows, 3)


def explanation(
    row: Row,
    parts: Shares | None,
    like: Alike | None,
    remedies: Sequence[Remedy],
    left_out: Sequence[Otherwise],
    before: float,
) -> str:
    """What is known about one error; `before` is the mean absolute error of the cell's group."""
    lines = [f"**{row.cell.name}** ({percent(row.error)})\n"]
    if parts:
        lines.append(
            f"- A round takes {duration(parts.round_s)}: {duration(parts.compute_s)} without"
            f" communication, and {duration(parts.exposed_s)} of communication that nothing hides;"
            f" {duration(parts.communication_s)} of it are under way in all."
        )
    if like:
        words = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in like.labels)
        lines.append(
            f"- The {like.cells} cells of {words} are off by {percent(like.error)} on average, all"
            f" others by {percent(like.others)}."
        )
    for remedy in remedies:
        shown = remedy.constant.shown
        here = f"`{remedy.constant.name}` is {shown(remedy.value)}"
        if remedy.needed is None or remedy.mape is None:
            lines.append(f"- {here}; no value within its bounds would meet this cell.")
        else:
            lines.append(
                f"- {here}; {shown(remedy.needed)} would meet this cell, with a mean absolute error"
                f" of {remedy.mape:.1%} over its group instead of {before:.1%}."
            )
    lines += [
        f"- Not in the model: {one.name}. With it, and no new fit, this cell would be off by"
        f" {percent(one.error)}, its group by {one.mape:.1%} on average instead of {before:.1%}."
        for one in left_out
    ]
    return "\n".join(lines) + "\n"
