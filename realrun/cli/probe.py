"""`realrun probe`: measure this cluster and write its file."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from co2sim.catalog import key_of, load_cluster, names
from co2sim.cli import options
from co2sim.common.errors import OptionError, UnitError, nearest
from co2sim.common.files import check_writable, write_atomically
from co2sim.common.units import duration, parse, percent, scaled
from realrun.cli import options as launching
from realrun.errors import PRECISIONS, SITES, one_of, sites_of
from realrun.lab.lab import CLUSTER

if TYPE_CHECKING:
    from rich.console import Console

    from co2sim.hardware.cluster import GPU
    from realrun.cli.ranks import Rank
    from realrun.probe.fit import Fitted, Measured, Residuals
    from realrun.probe.probe import Plan

_DEFAULTS = {"gloo": ("16 MiB", ("fp32",)), "nccl": ("256 MiB", ("bf16", "fp16", "fp32"))}
"""Largest collective, and precisions."""

_QUICK = ("1 MiB", "5 s")
_STATED = ("256 KiB", "20 s")
"""What hosts add shows in what passes with the burst of a lab."""
_BURSTS = 4
"""And in what takes a number of bursts, about 8 ms: how far it falls behind the shaper."""


def probe(  # noqa: PLR0913, PLR0917 - one argument per option
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            help="Cluster file to write; the figure has the same name and ends in .png.",
        ),
    ] = Path("cluster.toml"),
    name: Annotated[
        str | None,
        typer.Option(help="Name of the cluster in results; default: made from what was measured."),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="Of the kernels: fp32, fp16 or bf16. Repeatable; default: fp32 on CPUs, all on"
            " GPUs."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="State this GPU of the catalog instead of running kernels; `virtual` goes with"
            " --kernels sleep.",
        ),
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Largest collective; default: 16 MiB, on GPUs 256 MiB."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="About how long to measure; a longer time gives more exact numbers. Default: 30 s,"
            " with --stated 20 s.",
        ),
    ] = None,
    stated: Annotated[  # noqa: FBT002 - an option
        bool,
        typer.Option(
            "--stated",
            help="In a lab: keep the rates that it states, measure only what hosts add to them.",
        ),
    ] = False,
    quick: Annotated[  # noqa: FBT002 - an option
        bool,
        typer.Option(
            "--quick", help="Same as --budget '5 s', and without --stated --max-size '1 MiB'."
        ),
    ] = False,
    nproc: launching.Nproc = None,
    backend: launching.BackendName = "gloo",
    deadline: launching.Deadline = "60 s",
) -> None:
    """Measure the nodes at hand: a cluster file for co2sim, and a figure of the fits."""
    if out.suffix != ".toml":
        raise OptionError(f"--out is {out}; the name of a cluster file ends in .toml")
    means = launching.known_backend(backend)
    launching.checked_nproc(nproc)
    gpu = None if gpu is None else key_of("gpus", gpu)
    if gpu is not None and gpu not in names("gpus"):
        raise OptionError(f"--gpu is {gpu!r}; {nearest(gpu, names('gpus'))}")
    if gpu is not None and precision:
        raise OptionError("--precision does not apply with --gpu, which runs no kernels")
    if (sites := sites_of(os.environ)) > 1:
        raise OptionError(
            f"a probe measures one speed between nodes, and {SITES} is {sites}: probe the nodes of"
            " one site"
        )
    if stated and CLUSTER not in os.environ:
        raise OptionError("--stated needs a lab: only there are rates stated")
    usual_size, usual_time = _STATED if stated else (_DEFAULTS[backend][0], "30 s")
    if quick:
        usual_size, usual_time = usual_size if stated else _QUICK[0], _QUICK[1]
    seconds = options.seconds("--budget", budget or usual_time)
    size = max_size or usual_size
    precisions = _precisions(precision, backend) if gpu is None else ()
    largest = _size(size)
    wait = launching.checked_deadline(deadline)
    check_writable(out.parent)
    from realrun.cli import ranks  # noqa: PLC0415 - torch
    from realrun.probe.cluster_file import NOTHING  # noqa: PLC0415 - slow
    from realrun.probe.probe import Plan  # noqa: PLC0415 - torch, scipy

    settings = ranks.RankSettings(means, wait, nproc)
    if not precisions and str(nproc or os.environ.get("WORLD_SIZE")) == "1":
        raise OptionError(NOTHING)
    if nproc is not None:
        raise typer.Exit(ranks.start(settings, sys.argv[1:]))
    host = load_cluster(os.environ[CLUSTER]).value.host if stated else None
    beyond = _BURSTS * host.inter.size if host and host.inter else None
    plan = Plan(precisions, largest, seconds, means=stated, beyond=beyond)
    ranks.as_rank(
        settings, None, lambda rank: _measure(rank, plan, out, name, gpu, rates=not stated)
    )


def _precisions(given: list[str] | None, backend: str) -> tuple[str, ...]:
    for text in given or ():
        one_of("--precision", text, PRECISIONS)
    return tuple(dict.fromkeys(given or _DEFAULTS[backend][1]))


def _size(text: str) -> float:
    try:
        found = parse(text, "B")
    except UnitError as error:
        raise OptionError(f"--max-size: {error}") from None
    if not 2**14 <= found <= 2**34:
        raise OptionError(f"--max-size is {text!r}; it must be 16 KiB to 16 GiB")
    return found


def _measure(
    rank: "Rank",
    plan: "Plan",
    out: Path,
    name: str | None,
    gpu: str | None,
    *,
    rates: bool,
) -> None:
    """Measure as one rank among others; rank 0 writes and prints."""
    from realrun.probe.probe import probe as measure  # noqa: PLC0415 - torch

    measured = measure(rank.world, plan, rank.progress or (lambda _: None))
    if rank.world.rank:
        return
    from realrun.probe.cluster_file import to_toml  # noqa: PLC0415 - scipy
    from realrun.probe.figure import draw  # noqa: PLC0415 - matplotlib
    from realrun.probe.fit import fit  # noqa: PLC0415 - scipy

    lab = os.environ.get(CLUSTER)
    fitted = fit(measured, load_cluster(lab).value if lab else None, rates=rates)
    called = name or _name(measured, "probed" if rates else "stated rates and probed latencies")
    text = to_toml(measured, fitted, called, gpu)
    figure = out.with_suffix(".png")
    write_atomically({out: text.encode(), figure: draw(measured, fitted, called)})
    _print(measured, fitted, called)
    print(f"cluster file  {out}\nfigure        {figure}")
    if gpu is None:
        print(
            "co2sim calibrate needs a GPU of the catalog instead of measured kernels: probe with"
            " --gpu NAME for it"
        )


def _name(measured: "Measured", how: str) -> str:
    nodes, each = measured.layout.nodes, measured.layout.gpus_per_node
    return (
        f"{nodes} node{'s' if nodes > 1 else ''} of {each} rank{'s' if each > 1 else ''},"
        f" {measured.backend} on {measured.machine.partition(',')[0]}, {how}"
    )


def _print(measured: "Measured", fitted: "Fitted", name: str) -> None:
    from co2sim.common.tables import console  # noqa: PLC0415 - rich

    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    out = console()
    _print_links(out, fitted, name)
    if fitted.processor is not None:
        _print_processor(out, measured, fitted.processor)


def _print_links(out: "Console", fitted: "Fitted", name: str) -> None:
    from co2sim.common.tables import print_table  # noqa: PLC0415 - rich

    links = [
        (place, scaled(link.bandwidth, "B/s"), duration(link.latency))
        for place, link in (("inside a node", fitted.intra), ("between nodes", fitted.inter))
        if link is not None
    ]
    if not links:
        return
    print_table(out, f"{name}: links", ("link", "payload bandwidth", "latency"), links)
    lines: list[Sequence[str]] = [
        (
            str(group),
            str(kind),
            duration(line.latency),
            scaled(line.bandwidth, "B/s"),
            *_percent(line.residuals),
            *_percent(misfit),
        )
        for ((group, kind), line), misfit in zip(
            fitted.lines.items(), fitted.misfit.values(), strict=True
        )
    ]
    off = ("worst", "at the largest")
    titles = ("group", "collective", "latency", "bandwidth", "off by", *off, "links", *off)
    print_table(
        out,
        "collectives: latency + size / bandwidth of each, and how far it is off (median);"
        " the same for the links",
        titles,
        lines,
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
        ("more if it waits for another stream", duration(measured.handover)),
    ]
    for one in measured.slowdowns:
        size = duration(one.seconds)
        others += [
            (f"kernel under all-reduces of {size}, times as long", f"{one.compute:.2f}"),
            (f"all-reduce of {size} under kernels, times as long", f"{one.communication:.2f}"),
        ]
    if measured.together is not None:
        others.append(
            ("kernels of two streams together, times as long", f"{measured.together:.2f}")
        )
    print_table(out, "other", ("figure", "value"), others)


def _percent(off: "Residuals") -> tuple[str, str, str]:
    return f"{off.median:.1%}", f"{off.worst:.1%}", percent(off.last, 1)
