"""The report of `co2analysis verify`: every number in it comes from the run."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from analysis.convergence import figures
from analysis.convergence.pages import Block, Heading, Picture, Table, Text, markdown, to_html
from analysis.convergence.protocol.rates import FEATURES, STRATA
from analysis.convergence.protocol.verify import Findings
from analysis.convergence.report_grid import grid_blocks, short, term_blocks


def files(found: Findings, folder: Path, seconds: float) -> dict[Path, bytes]:
    """The report as Markdown and HTML, its figures, and the numbers as JSON."""
    pictures = {
        "bound.png": figures.bound_figure(found.rows),
        "rates.png": figures.rates_figure(found.rates),
        "rescue.png": figures.rescue_figure(found.controls["rescue"]),
        "oracle.png": figures.oracle_figure(found.oracle),
    }
    blocks = list(_blocks(found, seconds))
    whole = {folder / name: content for name, content in pictures.items()}
    whole[folder / "report.md"] = markdown(blocks)
    whole[folder / "report.html"] = to_html(blocks, pictures)
    whole[folder / "results.json"] = json.dumps(found.to_dict(), indent=1).encode()
    return whole


def _blocks(found: Findings, seconds: float) -> Iterator[Block]:
    yield Heading("The convergence bound of CO2, checked", 1)
    kind = "quick protocol" if found.quick else "whole protocol"
    verdict = "Everything holds." if found.passed else "NOT everything holds; see below."
    yield Text(
        f"{verdict} {kind.capitalize()}: {found.cells} cells,"
        f" {found.grid['configurations']:,} distinct configurations of the bound (of"
        f" {found.grid['settings']:,} settings), {seconds:.0f} s"
        " (cells of an earlier run that was interrupted are not counted in the time)."
    )
    lines = [[c.claim, "holds" if c.passed else "FAILS", c.found] for c in found.checks]
    yield Table(["claim", "", "found"], lines)
    yield from grid_blocks(found.grid)
    yield from term_blocks(found.grid, found.controls["terms"])
    yield from _rates(found.rates)
    yield from _isolation(found.controls)
    yield from _oracle(found.oracle)


def _rates(rates: Mapping[str, Any]) -> Iterator[Block]:
    yield Heading("Rates")
    yield Picture(
        "rates.png",
        "Exact value against T for alpha = 1, beta = 0, G = 8 and gamma L tau below 1; solid: the"
        " fit of four terms to cells with gamma L tau below 0.5; dotted: the same fit less its term"
        " G tau/T, not fitted again",
    )
    yield Text(
        "Step of the rate form: eta = sqrt(G/(T tau)), alpha = 1 - beta. Slopes are exponents of a"
        " power law in G, tau and T, exact, by strata of gamma L tau: "
        + ", ".join(f"{name} {low:g} to {high:g}" for name, low, high in STRATA)
        + "."
    )
    rows = [
        [
            line["family"],
            f"{line['beta']:g}",
            line["stratum"],
            f"{line['cells']}",
            *(f"{value:+.3f}" for value in line["slopes"]),
        ]
        for line in rates["slopes"]
    ]
    yield Table(["problem", "beta", "stratum", "cells", "G", "tau", "T"], rows)
    yield Text("Simulated slopes, three standard errors either way, and the oracle's, same cells:")
    rows = [
        [
            line["family"],
            f"{line['beta']:g}",
            f"{line['cells']}",
            *(
                f"{m:+.3f} [{low:+.3f}, {high:+.3f}], oracle {exact:+.3f}"
                for m, low, high, exact in zip(
                    line["measured"], line["low"], line["high"], line["exact"], strict=True
                )
            ),
        ]
        for line in rates["agreement"]
    ]
    yield Table(["problem", "beta", "cells", "G", "tau", "T"], rows)
    yield Text(
        "Nonnegative coefficients of the four features, with the 95 % interval of a bootstrap over"
        " cells, and the root mean square of the relative errors of this fit and of one that is"
        " made again without G tau/T, on cells with gamma L tau below 0.5:"
    )
    rows = [
        [
            line["family"],
            f"{line['beta']:g}",
            *(
                f"{c:.3f} [{low:.3f}, {high:.3f}]"
                for c, low, high in zip(
                    line["coefficients"], line["low"], line["high"], strict=True
                )
            ),
            f"{line['error']:.1%}",
            f"{line['error_without']:.1%}",
        ]
        for line in rates["fits"]
    ]
    yield Table(["problem", "beta", *FEATURES, "error", "refitted without G tau/T"], rows)


def _isolation(found: Mapping[str, Any]) -> Iterator[Block]:
    yield Heading("Staleness alone")
    yield Text(
        "CO2 minus SlowMo with the same noise, tau = 4, G = 4; beside it the standard error that"
        " independent noise would have given."
    )
    rows = [
        [
            line["family"],
            short(line["gamma"]),
            f"{line['beta']:g}",
            short(line["synchronous"]),
            f"{line['excess']:.3g} ± {line['error']:.1g}",
            f"± {line['alone']:.1g}",
        ]
        for line in found["staleness"]
    ]
    yield Table(["problem", "gamma", "beta", "SlowMo", "excess of CO2", "if noise differed"], rows)
    yield Heading("Where penalty and clipping rescue a run, and where they cost")
    yield Picture(
        "rescue.png",
        "Mean squared gradient with penalties and clips; arrows: above the figure, with the value",
    )
    yield Text(
        "tau = 16, G = 8, alpha = 1, beta = 0.5, measured mean squared gradient over that at the"
        " start; above 1 (marked lost) a run is worse than not moving. Clips are in units of"
        " gradients; the share of clipped elements stands in parentheses. Runs that clip are no"
        " part of the bound check."
    )
    for part in found["rescue"]:
        loads = list(dict.fromkeys(line["load"] for line in part["lines"]))
        rules = list(dict.fromkeys(line["rule"] for line in part["lines"]))
        rows = [
            [rule, *(_cell(line, part["first"]) for line in part["lines"] if line["rule"] == rule)]
            for rule in rules
        ]
        name = "CO2" if part["delay"] else "SlowMo"
        yield Table(
            [f"{name}, {part['family']}", *(f"gamma L tau = {load:g}" for load in loads)], rows
        )
    yield Heading("What must fail")
    controls = found["controls"]
    yield Text(
        f"A fixed step has the slope {controls['fixed_slope']:+.3f} in T, that of the rate form"
        f" {controls['scaled_slope']:+.3f}. Runs of the simulator without the delay fit SlowMo's"
        f" oracle, which shares no code with it (|z| up to"
        f" {controls['delay_0_against_delay_0']:.1f}), and that of CO2 refuses them (|z| up to"
        f" {controls['delay_0_against_delay_1']:.0f}). At the edge of stability, without noise:"
    )
    rows = [
        [f"{e['alpha']:g}", f"{e['beta']:g}", f"{e['factor']:g}", f"{e['growth']:.3g}"]
        for e in controls["beyond"]
    ]
    yield Table(["alpha", "beta", "alpha q over the edge", "f - f_inf, round 1000 over 500"], rows)


def _cell(line: Mapping[str, Any], first: float) -> str:
    text = f"{line['measured'] / first:.2g}"
    if line["clipped"]:
        text += f" ({line['clipped']:.0%})"
    return f"{text}, lost" if line["lost"] else text


def _oracle(found: Mapping[str, Any]) -> Iterator[Block]:
    yield Heading("Oracles")
    yield Picture("oracle.png", "Scores of simulated means, and edges of stability")
    yield Text(
        "Identities (z from points, sums from the noisy gradients, also within rounds): largest"
        f" relative error {found['largest_identity_error']:.1e} on {found['identities']} settings."
        f" {len(found['scores'])} z on"
        f" {found['configurations']} configurations, the largest {found['largest_score']:.2f}."
        f" Edge of stability on {len(found['edges'])} (alpha, beta): largest distance"
        f" {found['largest_edge_error']:.1e}."
    )
