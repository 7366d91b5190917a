"""`realrun probe`: measure this cluster and write its file."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from co2sim.catalog import key_of, load_cluster, names
from co2sim.cli import options
from co2sim.common import convert
from co2sim.common.convert import Reader, option
from co2sim.common.errors import OptionError, UnitError, nearest
from co2sim.common.files import check_writable, write_atomically
from co2sim.common.units import counted, duration, parse, percent, scaled
from realrun.cli.options import RankSettings, rank_options
from realrun.errors import PRECISIONS, SITES, one_of, sites_of
from realrun.lab.lab import CLUSTER

if TYPE_CHECKING:
    from rich.console import Console

    from co2sim.hardware.cluster import GPU
    from realrun.cli.ranks import Rank
    from realrun.probe.fit import Fitted, Measured
    from realrun.probe.probe import Plan

_SIZES = {"gloo": 2.0**24, "nccl": 2.0**28}
"""Bytes of the largest collective."""
_PRECISIONS = {"gloo": ("fp32",), "nccl": ("bf16", "fp16", "fp32")}

_QUICK = (2.0**20, 5.0)
"""Bytes, and seconds."""
_STATED = (2.0**18, 20.0)
"""What hosts add shows in what passes with the burst of a lab."""
_BURSTS = 4
"""And in what takes a number of bursts, about 8 ms: how far it falls behind the shaper."""


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """What to measure, and the files to write. Raises OptionError for what does not go together."""

    out: Path = option(
        Path("cluster.toml"),
        "Cluster file to write; the figure has the same name and ends in .png.",
        "probe",
        "--out",
        "-o",
    )
    name: str | None = option(
        None, "Name of the cluster in results; default: made from what was measured.", "probe"
    )
    precision: list[str] | None = option(
        None,
        "Of the kernels: fp32, fp16 or bf16. Repeatable; default: fp32 on CPUs, all on GPUs.",
        "probe",
    )
    gpu: Annotated[str | None, Reader(lambda _, text: key_of("gpus", text), "NAME")] = option(
        None,
        "State this GPU of the catalog instead of running kernels; `virtual` goes with --kernels"
        " sleep.",
        "probe",
    )
    max_size: Annotated[float | None, Reader(lambda _, text: _size(text), "SIZE")] = option(
        None, "Largest collective; default: 16 MiB, on GPUs 256 MiB.", "probe"
    )
    budget: Annotated[float | None, Reader(convert.seconds, "TIME")] = option(
        None,
        "About how long to measure; a longer time gives more exact numbers. Default: 30 s, with"
        " --stated 20 s.",
        "probe",
    )
    stated: bool = option(
        False,  # noqa: FBT003 - the default
        "In a lab: keep the rates that it states, measure only what hosts add to them.",
        "probe",
    )
    quick: bool = option(
        False,  # noqa: FBT003 - the default
        "Same as --budget '5 s', and without --stated --max-size '1 MiB'.",
        "probe",
    )

    def __post_init__(self) -> None:
        if self.out.suffix != ".toml":
            raise OptionError(f"--out is {self.out}; the name of a cluster file ends in .toml")
        if self.gpu is not None and self.gpu not in names("gpus"):
            raise OptionError(f"--gpu is {self.gpu!r}; {nearest(self.gpu, names('gpus'))}")
        if self.gpu is not None and self.precision:
            raise OptionError("--precision does not apply with --gpu, which runs no kernels")
        for text in self.precision or ():
            one_of("--precision", text, PRECISIONS)
        if self.stated and CLUSTER not in os.environ:
            raise OptionError("--stated needs a lab: only there are rates stated")

    def plan(self, backend: str) -> "Plan":
        """What to measure."""
        from realrun.probe.probe import Plan  # noqa: PLC0415 - torch

        size, time = _STATED if self.stated else (_SIZES[backend], 30.0)
        if self.quick:
            size, time = size if self.stated else _QUICK[0], _QUICK[1]
        host = load_cluster(os.environ[CLUSTER]).value.host if self.stated else None
        return Plan(
            tuple(dict.fromkeys(self.precision or _PRECISIONS[backend])) if not self.gpu else (),
            self.max_size or size,
            self.budget or time,
            means=self.stated,
            beyond=_BURSTS * host.inter.size if host and host.inter else None,
        )


@options.record_options(ProbeOptions, "request")
@rank_options
def probe(request: ProbeOptions, how: RankSettings) -> None:
    """Measure the nodes at hand: a cluster file for co2sim, and a figure of the fits."""
    if (sites := sites_of(os.environ)) > 1:
        raise OptionError(
            f"a probe measures one speed between nodes, and {SITES} is {sites}: probe the nodes of"
            " one site"
        )
    if (lab := os.environ.get(CLUSTER)) and load_cluster(lab).value.fabric:
        raise OptionError(
            "a probe measures one speed between nodes, and this lab has leaves: probe without"
            " --leaf"
        )
    check_writable(request.out.parent)
    from realrun.cli import ranks  # noqa: PLC0415 - torch

    if request.gpu and str(how.nproc or os.environ.get("WORLD_SIZE")) == "1":
        raise OptionError(
            "nothing can be measured: a single rank has no other to communicate with, and --gpu"
            " leaves out kernels"
        )
    if how.nproc is not None:
        raise typer.Exit(ranks.start(how, sys.argv[1:]))
    plan = request.plan(how.backend)
    ranks.as_rank(how, None, lambda rank: _measure(rank, plan, request))


def _size(text: str) -> float:
    try:
        size = parse(text, "B")
    except UnitError as error:
        raise OptionError(f"--max-size: {error}") from None
    if not 2**14 <= size <= 2**34:
        raise OptionError(f"--max-size is {text!r}; it must be 16 KiB to 16 GiB")
    return size


def _measure(rank: "Rank", plan: "Plan", request: ProbeOptions) -> None:
    """Measure as one rank among others; rank 0 writes and prints."""
    from realrun.probe.probe import probe as measure  # noqa: PLC0415 - torch

    measured = measure(rank.world, plan, rank.progress or (lambda _: None))
    if rank.world.rank:
        return
    from realrun.probe.cluster_file import to_toml  # noqa: PLC0415 - scipy
    from realrun.probe.figure import draw  # noqa: PLC0415 - matplotlib
    from realrun.probe.fit import fit  # noqa: PLC0415 - scipy

    lab = os.environ.get(CLUSTER)
    fitted = fit(measured, load_cluster(lab).value if lab else None, rates=not request.stated)
    how = "stated rates and probed latencies" if request.stated else "probed"
    called = request.name or _name(measured, how)
    text = to_toml(measured, fitted, called, request.gpu)
    out, figure = request.out, request.out.with_suffix(".png")
    write_atomically({out: text.encode(), figure: draw(measured, fitted, called)})
    _print(measured, fitted, called)
    print(f"cluster file  {out}\nfigure        {figure}")
    if request.gpu is None:
        print(
            "co2sim calibrate needs a GPU of the catalog instead of measured kernels: probe with"
            " --gpu NAME for it"
        )


def _name(measured: "Measured", how: str) -> str:
    nodes, each = measured.layout.nodes, measured.layout.gpus_per_node
    hardware = measured.machine.partition(",")[0]
    size = f"{counted(nodes, 'node')} of {counted(each, 'rank')}"
    return f"{size}, {measured.backend} on {hardware}, {how}"


def _print(measured: "Measured", fitted: "Fitted", name: str) -> None:
    from co2sim.common.tables import console  # noqa: PLC0415 - rich

    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    out = console()
    _print_links(out, measured, fitted, name)
    if fitted.processor is not None:
        _print_processor(out, measured, fitted.processor)


def _print_links(out: "Console", measured: "Measured", fitted: "Fitted", name: str) -> None:
    from co2sim.common.tables import print_table  # noqa: PLC0415 - rich
    from realrun.probe.fit import by_kind  # noqa: PLC0415 - only for this table

    links = [
        (where, scaled(link.bandwidth, "B/s"), duration(link.latency))
        for where, link in (("inside a node", fitted.intra), ("between nodes", fitted.inter))
        if link is not None
    ]
    if not links:
        return
    print_table(out, f"{name}: links", ("link", "payload bandwidth", "latency"), links)
    seen = by_kind(measured.collectives)
    print_table(
        out,
        "collectives: times of the smallest and the largest, how far the links are off (median)",
        ("group", "collective", "smallest", "largest", "off by", "worst", "at the largest"),
        [
            (
                str(group),
                str(kind),
                *(duration(seen[group, kind][index].seconds) for index in (0, -1)),
                f"{off.median:.1%}",
                f"{off.worst:.1%}",
                percent(off.last, 1),
            )
            for (group, kind), off in fitted.misfit.items()
        ],
        left=2,
    )


def _print_processor(out: "Console", measured: "Measured", processor: "GPU") -> None:
    from co2sim.common.tables import print_table  # noqa: PLC0415 - rich
    from realrun.probe.fit import attained  # noqa: PLC0415 - only for this table

    for precision, samples in measured.compute.items():
        speeds = attained(samples, measured.launch)
        best = processor.peak[precision]
        print_table(
            out,
            f"kernels in {precision}, all ranks of a node at once",
            ("FLOP", "time", "speed", "of the best"),
            [
                (
                    scaled(sample.work.flops, "FLOP"),
                    duration(sample.seconds),
                    scaled(speeds[sample.work.flops], "FLOP/s"),
                    f"{speeds[sample.work.flops] / best:.1%}",
                )
                for sample in samples
            ],
        )
    others = [
        ("memory bandwidth", scaled(processor.memory_bandwidth, "B/s")),
        ("overhead of an op", duration(measured.launch)),
    ]
    for slowdown in measured.slowdowns:
        size = duration(slowdown.seconds)
        others += [
            (f"kernel under all-reduces of {size}, times as long", f"{slowdown.compute:.2f}"),
            (f"all-reduce of {size} under kernels, times as long", f"{slowdown.communication:.2f}"),
        ]
    if measured.together is not None:
        others.append(
            ("kernels of two streams together, times as long", f"{measured.together:.2f}")
        )
    print_table(out, "other", ("figure", "value"), others)
