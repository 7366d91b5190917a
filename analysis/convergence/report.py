"""The report of `co2analysis verify`: every number in it comes from the run.

Its words are in templates/verify.md.j2; `analysis.convergence.page` makes a page of them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from analysis.convergence import figures
from analysis.convergence.bound import TERMS
from analysis.convergence.protocol import clip_checks
from analysis.convergence.protocol.checks import Findings
from analysis.convergence.protocol.clip_checks import ClippingFindings
from analysis.convergence.protocol.controls import Rescue
from analysis.convergence.protocol.isolation import RescueLine, TermPart
from analysis.convergence.protocol.rate_fits import FEATURES, STRATA, RateFit, SlopeAgreement
from analysis.convergence.protocol.tightness import LATE, RatioGroup, Sensitivity, margin
from co2sim.common.units import counted
from co2sim.report import markdown
from co2sim.report.html import Page, render


@dataclass(frozen=True, slots=True)
class TermLine:
    """One term at a share of the largest inner step; its ratios for several tau, as texts."""

    term: str
    fraction: float
    ratios: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RescueTable:
    """What penalty and clipping did on one family: a line for each rule, a column for each step."""

    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyContext:
    """What the template shows.

    `passing` are the terms that may be too small by some factor without being noticed, `unseen` the
    parts of the bound that could be missing, `unseen_usually` the terms that could be missing
    without the runs that begin at a minimum.
    """

    title: str
    findings: Findings
    margin_of_8_seeds: float
    groupings: tuple[tuple[str, Mapping[str, RatioGroup]], ...]
    term_columns: tuple[str, ...]
    term_lines: tuple[TermLine, ...]
    passing: Mapping[str, Sensitivity]
    unseen: tuple[str, ...]
    unseen_usually: tuple[str, ...]
    only_outer_step_seen: bool
    strata: Sequence[tuple[str, float, float]]
    features: Sequence[str]
    rescue_tables: tuple[RescueTable, ...]
    theorems: Sequence[str]
    mutations: Sequence[str]


def files(
    findings: Findings,
    folder: Path,
    command: str = "co2analysis verify",
    also: Path | None = None,
) -> dict[Path, bytes]:
    """The report as Markdown and HTML, its figures, and the numbers as JSON.

    `also` is a further place for the HTML, which says that `command` repeats it.
    """
    pictures = {
        "bound.png": figures.bound_figure(findings.rows),
        "rates.png": figures.rates_figure(findings.rates),
        "rescue.png": figures.rescue_figure(findings.isolation.rescue),
        "oracle.png": figures.oracle_figure(findings.oracle),
    }
    text = render_markdown(make_context(findings))
    numbers = json.dumps(findings.to_dict(), indent=1)
    html = render(page(findings, text, pictures, numbers, command))
    whole = {folder / name: content for name, content in pictures.items()}
    whole[folder / "report.md"] = text.encode()
    whole[folder / "report.html"] = html
    whole[folder / "results.json"] = numbers.encode()
    return whole if also is None else whole | {also: html}


def make_context(findings: Findings) -> VerifyContext:
    """The numbers that are not among the findings themselves."""
    grid = findings.grid
    noticed, usually = grid.noticed, grid.noticed_usually
    taus = tuple(dict.fromkeys(part.tau for part in findings.isolation.terms))
    return VerifyContext(
        title="The convergence bound of CO2, checked",
        findings=findings,
        margin_of_8_seeds=margin(8),
        groupings=(
            ("problem", grid.by_family),
            ("largest term of the bound", grid.by_term),
            ("penalty", grid.by_penalty),
            ("delay", grid.by_delay),
        ),
        term_columns=tuple(f"part/term, tau = {tau}" for tau in taus),
        term_lines=tuple(_term_lines(findings.isolation.terms, taus)),
        passing={name: noticed[name] for name in TERMS if noticed[name].begins > 0},
        unseen=tuple(name for name, part in noticed.items() if part.begins <= 0),
        unseen_usually=tuple(name for name in TERMS if usually[name].begins <= 0),
        only_outer_step_seen=noticed[LATE].begins <= 0 < noticed["staleness"].begins,
        strata=STRATA,
        features=FEATURES,
        rescue_tables=tuple(map(_rescue_table, findings.isolation.rescue)),
        theorems=clip_checks.THEOREMS,
        mutations=clip_checks.MUTATIONS,
    )


def _term_lines(parts: Sequence[TermPart], taus: Sequence[int]) -> list[TermLine]:
    """Terms in the order of the alphabet; a term that is 0 for some tau has no ratio there."""
    ratios: dict[tuple[str, float], dict[int, float]] = {}
    for part in parts:
        if part.ratio is not None:
            ratios.setdefault((part.term, part.fraction), {})[part.tau] = part.ratio
    lines = [
        TermLine(
            term, fraction, tuple(f"{by_tau[tau]:.3f}" if tau in by_tau else "-" for tau in taus)
        )
        for (term, fraction), by_tau in ratios.items()
    ]
    return sorted(lines, key=lambda line: line.term)


def _rescue_table(rescue: Rescue) -> RescueTable:
    loads = dict.fromkeys(line.load for line in rescue.lines)
    rules = dict.fromkeys(line.rule for line in rescue.lines)
    name = f"{'CO2' if rescue.delay else 'SlowMo'}, {rescue.family}"
    return RescueTable(
        (name, *(f"gamma L tau = {load:g}" for load in loads)),
        tuple(
            (rule, *(_rescued(line, rescue.first) for line in rescue.lines if line.rule == rule))
            for rule in rules
        ),
    )


def _rescued(line: RescueLine, first: float) -> str:
    text = f"{line.measured / first:.2g}"
    if line.clipped:
        text += f" ({line.clipped:.0%})"
    return f"{text}, lost" if line.lost else text


def render_markdown(context: VerifyContext) -> str:
    """The report as Markdown; its pictures are files in the same folder."""
    names = [field.name for field in fields(context)]
    template = _environment().get_template("verify.md.j2")
    return template.render({name: getattr(context, name) for name in names})


def clipping_markdown(findings: ClippingFindings) -> str:
    """The part of the report about clipping alone."""
    template = _environment().get_template("clipping.md.j2")
    return template.render(
        findings={"clipping": findings},
        theorems=clip_checks.THEOREMS,
        mutations=clip_checks.MUTATIONS,
    )


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("analysis.convergence"),
        autoescape=select_autoescape(),  # of HTML; this is Markdown
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals |= {"row": row, "columns": columns}
    environment.filters |= {
        "number": format,
        "short": short,
        "seeds": _seeds,
        "begins": _begins,
        "coefficients": _coefficients,
        "agreements": _agreements,
    }
    return environment


def row(*cells: object) -> str:
    """A row of a Markdown table, with a cell for each element of a list; no cell can break it."""
    return "| " + " | ".join(text.replace("|", "\\|") for text in _texts(cells)) + " |"


def columns(*names: object) -> str:
    """The first two lines of a Markdown table, of names and lists of names."""
    return f"{row(*names)}\n{row(['---'] * len(_texts(names)))}"


def _texts(cells: Sequence[object]) -> list[str]:
    lists = (cell if isinstance(cell, list | tuple) else [cell] for cell in cells)
    return [str(cell) for cells in lists for cell in cells]


def short(value: object) -> str:
    """Three digits of a number."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _seeds(group: RatioGroup) -> str:
    least, most = group.least_seeds, group.most_seeds
    if most == 0:
        return "exact"
    low = "exact" if least == 0 else f"{least:,}"
    return low if least == most else f"{low} to {most:,}"


def _begins(part: Sensitivity) -> str:
    return f"x {part.begins:.3f}" if part.begins > 0 else "never"


def _coefficients(fit: RateFit) -> list[str]:
    parts = zip(fit.coefficients, fit.low, fit.high, strict=True)
    return [f"{value:.3f} [{low:.3f}, {high:.3f}]" for value, low, high in parts]


def _agreements(line: SlopeAgreement) -> list[str]:
    parts = zip(line.measured, line.low, line.high, line.exact, strict=True)
    return [
        f"{value:+.3f} [{low:+.3f}, {high:+.3f}], oracle {exact:+.3f}"
        for value, low, high, exact in parts
    ]


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
