"""The figures of the report, as PNG."""

from collections.abc import Callable, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.convergence.bound import TERMS, Bound
from analysis.convergence.protocol.controls import Rescue
from analysis.convergence.protocol.oracle import OracleFindings
from analysis.convergence.protocol.rate_fits import RateFindings
from analysis.convergence.protocol.tightness import TightnessRow, distinct
from co2sim.common.plots import BLACK, COLOURS, GRID, STYLE, render

_MARKERS = "osD^vP*X"
_CEILING = 1e2
"""Where diverged runs are drawn."""
_ENDLESS = 1e30
"""Values above are called diverged."""


def bound_figure(rows: Sequence[TightnessRow]) -> bytes:
    """Measured against bound, and the ratio by family."""
    feasible = distinct([row for row in rows if isinstance(row.bound, Bound)])

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
        _draw_points(left, feasible)
        _draw_ratios(right, feasible)

    return _drawn((11.0, 5.0), draw)


def _draw_points(axis: Axes, rows: Sequence[TightnessRow]) -> None:
    """Measured against bound, by the largest term; terms with many points lie below."""
    points = {
        name: np.array(
            [(r.total, r.measured) for r in rows if r.dominant == name and r.measured > 0 < r.total]
        )
        for name in TERMS
    }
    for layer, name in enumerate(sorted(TERMS, key=lambda name: -len(points[name]))):
        place = TERMS.index(name)
        if len(points[name]):
            axis.plot(
                *points[name].T,
                _MARKERS[place],
                color=COLOURS[place],
                ms=2 if layer == 0 else 3,
                alpha=0.25 if layer == 0 else 0.6,
                mew=0,
                zorder=2 + layer,
                label=f"{name} ({len(points[name]):,})",
                rasterized=True,
            )
    shown = np.concatenate([part for part in points.values() if len(part)])
    ends = np.array([shown[:, 0].min(), shown[:, 0].max()])
    axis.plot(ends, ends, color="black", lw=1)
    axis.set(xscale="log", yscale="log", xlabel="bound", ylabel="measured mean of |grad f|²")
    title = f"{len(rows):,} configurations; none may be above the line"
    axis.set_title(title, loc="left", fontsize=9)
    axis.set_ylim(shown[:, 1].min() / 2, max(ends[1], shown[:, 1].max()) * 2)
    legend = axis.legend(title="largest term of the bound", fontsize=8, markerscale=2.5)
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_alpha(1)


def _draw_ratios(axis: Axes, rows: Sequence[TightnessRow]) -> None:
    """Range, quartiles and median of measured over bound, by family."""
    families = list(dict.fromkeys(row.family for row in rows))
    ratios = [[min(row.ratio, _CEILING) for row in rows if row.family == name] for name in families]
    axis.boxplot(
        ratios[::-1],
        orientation="horizontal",
        whis=(0, 100),
        widths=0.6,
        patch_artist=True,
        boxprops={"facecolor": COLOURS[5], "edgecolor": COLOURS[0]},
        medianprops={"color": COLOURS[1], "lw": 1.5},
    )
    axis.axvline(1, color="black", lw=1)
    axis.set_yticks(range(1, len(families) + 1), families[::-1])
    axis.set(xlim=(0, 1.05), xlabel="measured / bound: range, quartiles, median")
    axis.set_title("by problem; the line is the bound", loc="left", fontsize=9)


def rates_figure(findings: RateFindings) -> bytes:
    """A against T, exact and fitted, for equal and for different workers; alpha = 1, beta = 0."""
    names = ("isotropic", "two kinds")
    titles = ("all workers alike", "two kinds of workers")

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, 2, sharey=True)
        for axis, name, title in zip(axes, names, titles, strict=True):
            curve = np.array(findings.curves[name])
            fit = next(line for line in findings.fits if line.family == name)
            for tau, colour, marker in zip((1, 4, 16, 64), COLOURS, _MARKERS, strict=False):
                _, rounds, exact = curve[curve[:, 0] == tau].T
                axis.plot(rounds, exact, marker, color=colour, ms=4, label=f"tau = {tau}")
                features = np.array(
                    [1 / np.sqrt(8 * tau * rounds), 1 / rounds, 8 / rounds, 8 * tau / rounds]
                )
                axis.plot(rounds, np.array(fit.coefficients) @ features, color=colour, lw=1)
                bare = np.array(fit.coefficients[:3]) @ features[:3]
                axis.plot(rounds, bare, color=colour, lw=1, ls=":")
            axis.set(xscale="log", yscale="log", xlabel="outer rounds T")
            axis.set_title(
                f"{title}\ncoefficient of G tau/T: {fit.coefficients[3]:.3f}"
                f" [{fit.low[3]:.3f}, {fit.high[3]:.3f}]",
                loc="left",
                fontsize=9,
            )
        axes[0].set_ylabel("mean of |grad f|², exact; G = 8, alpha = 1, beta = 0")
        figure.legend(
            *axes[0].get_legend_handles_labels(),
            loc="outside right center",
            fontsize=8,
            title="solid: fit of four terms, gamma L tau < 0.5\n"
            "dotted: the same less G tau/T, not refitted\npoints: gamma L tau < 1",
            title_fontsize=7,
        )

    return _drawn((11.0, 4.2), draw)


def rescue_figure(rescues: Sequence[Rescue]) -> bytes:
    """Where penalty and clipping keep a run from diverging, and where they slow it down."""
    families = list(dict.fromkeys(part.family for part in rescues))
    titles = {1: "CO2", 0: "SlowMo"}

    def draw(figure: Figure) -> None:
        axes = figure.subplots(2, len(families), squeeze=False, sharex=True, sharey="col")
        for part in rescues:
            axis = axes[0 if part.delay else 1][families.index(part.family)]
            rules = list(dict.fromkeys(line.rule for line in part.lines))
            beyond: list[tuple[float, float]] = []
            palette = (BLACK, *(colour for colour in COLOURS if colour != BLACK))
            for rule, colour, marker in zip(rules, palette, _MARKERS, strict=False):
                mine = [line for line in part.lines if line.rule == rule]
                loads = [line.load for line in mine]
                true = [line.measured / part.first for line in mine]
                values = [min(value, _CEILING) for value in true]
                beyond += [
                    (load, value)
                    for load, value in zip(loads, true, strict=True)
                    if value > _CEILING
                ]
                style = "-" if "clip" not in rule else "--"
                axis.plot(
                    loads, values, style, marker=marker, color=colour, ms=4, lw=1.2, label=rule
                )
            axis.axhline(1, color="black", lw=0.8, ls=":")
            axis.set_yscale("log")
            _mark_beyond(axis, beyond)
            axis.set_title(f"{titles[part.delay]}, {part.family}", loc="left", fontsize=9)
        for axis in axes[1]:
            axis.set_xlabel("gamma L tau")
        for row in axes:
            row[0].set_ylabel("mean |grad f|² / at the start")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)

    return _drawn((2.9 * len(families) + 1.2, 6.2), draw)


def _mark_beyond(axis: Axes, beyond: Sequence[tuple[float, float]]) -> None:
    """An arrow for each place where runs are above the figure, with the largest value there."""
    for load in {load for load, _ in beyond}:
        largest = max(value for place, value in beyond if place == load)
        text = "diverged" if largest > _ENDLESS else f"{largest:.0e}"
        axis.annotate(
            text,
            (load, _CEILING),
            (0, 18),
            textcoords="offset points",
            ha="center",
            fontsize=6,
            arrowprops={"arrowstyle": "<-", "lw": 1.0, "shrinkB": 2},
        )
    if beyond:
        axis.set_ylim(top=_CEILING * 10)


def oracle_figure(findings: OracleFindings) -> bytes:
    """The z of simulated means, and measured against exact edges of stability."""

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        left.hist(findings.scores, bins=np.linspace(-4.5, 4.5, 28), color=COLOURS[0], density=True)
        line = np.linspace(-4.5, 4.5, 200)
        left.plot(line, np.exp(-(line**2) / 2) / np.sqrt(2 * np.pi), color=COLOURS[1])
        left.set(xlabel="z of simulated against exact moments; line: normal", ylabel="density")
        for delay, name, colour, marker in ((1, "CO2", 0, "o"), (0, "SlowMo", 1, "s")):
            points = [(edge.beta, edge.measured) for edge in findings.edges if edge.delay == delay]
            right.plot(
                *zip(*points, strict=True),
                marker,
                color=COLOURS[colour],
                ms=4,
                label=f"{name}, measured",
            )
        beta = np.linspace(0, 0.95, 50)
        right.plot(beta, 1 - beta, color=COLOURS[0], lw=1, label="1 - beta")
        right.plot(beta, 2 * (1 + beta), color=COLOURS[1], lw=1, label="2 (1 + beta)")
        right.set(xlabel="outer momentum beta", ylabel="alpha q at the edge of stability")
        right.legend(fontsize=8)

    return _drawn((9.0, 3.6), draw)


def _drawn(size: tuple[float, float], draw: Callable[[Figure], None]) -> bytes:
    with mpl.rc_context(STYLE | GRID):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        for axis in figure.axes:
            _plain(axis)
        return render(figure, "png")


def _plain(axis: Axes) -> None:
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
