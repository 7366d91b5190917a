"""The figure of a probe: what was measured, and the fits through it."""

from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    EngFormatter,
    FuncFormatter,
    NullFormatter,
    NullLocator,
    PercentFormatter,
)

from co2sim.common.plots import COLOURS, GRID, PLAIN_TEXT, STYLE, render
from co2sim.common.units import duration, scaled
from co2sim.hardware.cluster import GPU, Cluster
from co2sim.schedule.schedule import Group, Kind
from realrun.probe.cluster_file import size_text
from realrun.probe.fit import Fitted, Measured, Sample, attained, bare, by_kind, predict

_COLOURS = dict(zip(Kind, COLOURS, strict=False))
_MARKERS = dict(zip(Kind, "osD^vP", strict=True))
_MAX_SIZES = 8
"""Of kernels: labels that a panel has room for."""


def draw(measured: Measured, fitted: Fitted, name: str) -> bytes:
    """The figure as PNG."""
    with mpl.rc_context(STYLE | GRID | PLAIN_TEXT):
        return render(figure(measured, fitted, name), "png")


def figure(measured: Measured, fitted: Fitted, name: str) -> Figure:
    """A panel for every group, time by size, and one for kernels, efficiency by size.

    Points are measured; lines are what co2sim predicts from the fitted links.
    """
    kinds = by_kind(measured.collectives)
    groups = list(dict.fromkeys(group for group, _ in kinds))
    panels = len(groups) + (fitted.processor is not None)
    drawn = Figure(figsize=(max(6.4, 4.6 * panels + 0.4), 4.8), layout="constrained")
    axes = drawn.subplots(1, panels, squeeze=False)[0]
    here = fitted.intra or fitted.inter
    for axis, group in zip(axes, groups, strict=False):
        assert here is not None
        links = (fitted.intra or here, fitted.inter or here)
        cluster = bare(measured.layout, measured.backend, *links, fitted.hosts)
        samples_of = {
            kind: samples
            for (group_of_kind, kind), samples in kinds.items()
            if group_of_kind == group
        }
        _collectives(axis, samples_of, cluster)
        axis.set_title(_title(group, measured), fontsize=9)
    if fitted.processor is not None:
        _kernels(axes[-1], measured, fitted.processor)
    if groups:
        axes[0].set_ylabel("time")
        drawn.legend(
            *axes[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=5 if panels > 1 else 3,
            frameon=False,
        )
    drawn.suptitle(name)
    return drawn


def _title(group: Group, measured: Measured) -> str:
    members = len(group.members(0, measured.layout))
    return f"{group}: {members} ranks"


def _collectives(axis: Axes, samples_of: Mapping[Kind, Sequence[Sample]], cluster: Cluster) -> None:
    """Time by size, for every kind."""
    sizes: list[float] = []
    for kind, samples in samples_of.items():
        sizes = [sample.work.bytes for sample in samples]
        colour = _COLOURS[kind]
        axis.plot(
            sizes,
            [sample.seconds for sample in samples],
            color=colour,
            marker=_MARKERS[kind],
            linestyle="none",
            markersize=5,
            label=str(kind),
        )
        axis.plot(sizes, predict(samples, cluster), color=colour, linewidth=1)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sizes, [size_text(size) for size in sizes], rotation=45)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: duration(seconds)))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("size of the buffer; lines: predicted from the fitted links")


def _kernels(axis: Axes, measured: Measured, gpu: GPU) -> None:
    """Attained fraction of the best speed by size, for every precision."""
    sizes: set[float] = set()
    for index, (precision, samples) in enumerate(measured.compute.items()):
        speeds = attained(samples, measured.launch)
        sizes |= speeds.keys()
        axis.plot(
            list(speeds),
            [speed / gpu.peak[precision] for speed in speeds.values()],
            color=COLOURS[index],
            marker="osD"[index],
            markersize=5,
            label=f"{precision}: at most {scaled(gpu.peak[precision], 'FLOP/s')}",
        )
    axis.set_xscale("log")
    axis.set_ylim(0, 1.05)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    every = -(-len(sizes) // _MAX_SIZES)
    axis.set_xticks(sorted(sizes, reverse=True)[::every])
    axis.xaxis.set_major_formatter(EngFormatter(places=0, sep=""))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("FLOP of a kernel")
    axis.set_ylabel("attained share of the best speed")
    axis.set_title("kernels", fontsize=9)
    axis.legend(loc="lower right", frameon=False)
