"""`co2analysis compare` and `lab`: measured runs compared with their prediction."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from analysis.measured.comparison import changed
from co2sim.catalog import Fact, load_cluster, load_model
from co2sim.cli import options
from co2sim.cli.options import Report
from co2sim.common.cli import command_line, keeping
from co2sim.common.errors import OptionError
from co2sim.common.files import check_writable, write_atomically
from co2sim.common.tables import console, print_lines, print_table
from co2sim.hardware.cluster import Cluster
from co2sim.report.bundle import check, check_installed
from co2sim.schedule.schedule import DType
from co2sim.strategies import parse
from realrun import record
from realrun.errors import PRECISIONS, one_of
from realrun.lab.lab import Dilation, Lab
from realrun.lab.time_dilation import SLEEPING
from realrun.launch.processes import started
from realrun.record import folder_name

FP32 = DType.FP32
"""What `--probe` measures kernels in: processors compute in it at full speed."""

if TYPE_CHECKING:
    from analysis.measured.comparison import RunComparison


def compare(  # noqa: PLR0917 - one argument per option
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folder of a run, or a folder that holds several."),
    ],
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            "-c",
            help="Predict on this cluster (catalog name or TOML file) instead of the recorded one.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Override a number of the cluster. Repeatable.",
        ),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            help="Draw both timelines here (.png or .svg); one file per run, if there are several."
        ),
    ] = None,
    rank: Annotated[int, typer.Option(metavar="N", help="Whose timelines are drawn.")] = 0,
    csv: Annotated[Path | None, typer.Option(help="Write every op to this CSV file.")] = None,
    report: Report = None,
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """Compare measured runs with their prediction: figures, ops, and what causes the errors."""
    if figure is not None and figure.suffix not in {".png", ".svg"}:
        raise OptionError(f"--figure {figure}: the file must end in .png or .svg")
    check("--report", report)
    if figure is not None:
        check_installed()
    changes = options.pairs(overrides, "--set")
    comparisons = _compared(runs, cluster, changes)
    files = {} if figure is None else _figures(comparisons, figure, rank)
    if report is not None:
        stated = () if cluster is None else load_cluster(cluster, changes).facts
        files[report] = _page(comparisons, rank, stated, list(changes))
    _report(comparisons, files, csv=csv, as_json=json_)


@options.record_options(Lab, "stated")
def lab(  # noqa: PLR0913, PLR0917 - one argument per option
    context: typer.Context,
    strategy: Annotated[
        list[str], typer.Option("--strategy", "-s", help="As in `realrun run`. Repeatable.")
    ],
    model: options.Model,
    stated: Lab,
    dilation: Dilation = "auto",
    kernels: Annotated[
        str,
        typer.Option(
            help="As in `realrun run`. flops needs --probe or --cluster: the lab states rates, and"
            " no processor."
        ),
    ] = "sleep",
    precision: Annotated[
        str | None,
        typer.Option(help="As in `realrun run`; --probe measures the kernels in it (fp32)."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", "-c", help="Predict on this cluster, not on the lab's own."),
    ] = None,
    probe: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--probe",
            help="Predict from a probe in the lab, of its links and of the kernels that run; else"
            " from its stated rates, and latencies that are measured in it for 5 s.",
        ),
    ] = False,
    figure: Annotated[
        Path | None, typer.Option(help="As in `compare`: draw both timelines here.")
    ] = None,
    report: Report = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder; every strategy gets one inside.")
    ] = Path("out"),
) -> None:
    """Execute strategies in a lab on this machine (root), and compare them with their prediction.

    Further options, such as --rounds, are those of `realrun run`. Links between sites or leaves are
    predicted from their stated rates, with the latency that is measured between nodes.
    """
    for text in strategy:
        parse(text)
    check("--report", report)
    if figure is not None:
        check_installed()
    _check_kernels(kernels, cluster, probe=probe)
    if precision is not None:
        one_of("--precision", precision, PRECISIONS)
    load_model(model)
    check_writable(out)
    built = stated.slower(dilation, (*SLEEPING, "--kernels", kernels))
    strategies = [item for text in strategy for item in ("--strategy", text)]
    words = ["--model", model, *strategies, "--kernels", kernels, "--out", str(out), "--json"]
    words += ["--precision", precision] if precision else []
    with keeping("runs that had finished are kept"):
        if cluster is None and (probe or built.world_size > 1):
            cluster = str(out / "probe.toml")
            run = ["--gpu", "virtual"] if kernels == "sleep" else ["--precision", precision or FP32]
            run += [] if probe else ["--stated"]
            _in_lab(built.one_switch.arguments, ["probe", *run, "--out", cluster])
            on = ["--cluster", cluster, *_beyond(built, cluster)]
        else:
            on = ["--cluster", cluster] if cluster else []
        _in_lab(built.arguments, ["run", *on, *words, *context.args])
        folders = [out / folder_name(text) for text in strategy]
        comparisons = _compared(folders)
        files = {} if figure is None else _figures(comparisons, figure, 0)
        if report is not None:
            files[report] = _page(comparisons)
        _report(comparisons, files)


def gpu(
    path: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="gpu.json of benchmarks/gpu/run.sh, or its folder."),
    ],
    cluster: Annotated[
        list[str] | None,
        typer.Option(
            "--cluster",
            "-c",
            help="Predict with the GPU of this cluster instead of the usual ones. Repeatable.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write a Markdown page.")] = None,
) -> None:
    """Show what was measured on one GPU, beside predictions of its kernels, steps and memory."""
    from analysis.measured import gpu_page  # noqa: PLC0415 - the simulator

    measured = gpu_page.read(path, cluster or ())
    if out is not None:
        write_atomically({out: gpu_page.markdown(measured).encode()})
    shown = console()
    print_lines(shown, *gpu_page.heading(measured), "")
    for table in gpu_page.tables(measured):
        print_table(shown, table.title, table.columns, table.rows, left=2)
    if out is not None:
        shown.print(f"written {out}", highlight=False, markup=False, soft_wrap=True)


def _beyond(lab: Lab, probed: str) -> list[str]:
    """What a probe of the same nodes on one switch does not say of sites or leaves, as options."""
    facts = lab.beyond(load_cluster(probed).value.inter.latency) if lab.uplink else {}
    return [word for key, text in facts.items() for word in ("--set", f"{key}={text}")]


def _check_kernels(kernels: str, cluster: str | None, *, probe: bool) -> None:
    """Refuse what would be predicted from other kernels than those that run."""
    one_of("--kernels", kernels, ("sleep", "flops"))
    if probe and cluster:
        raise OptionError(f"--cluster {cluster} and --probe: the prediction has one source")
    if kernels == "flops" and not (probe or cluster):
        raise OptionError(
            "--kernels flops needs --probe (or --cluster FILE): the lab states its rates, and real"
            " kernels can only be predicted from a processor that was measured"
        )


def _compared(
    runs: Sequence[Path], cluster: str | None = None, changes: Mapping[str, str] | None = None
) -> list["RunComparison"]:
    """Every run in these folders with its prediction, on another cluster if one is given."""
    from analysis.measured.comparison import compare  # noqa: PLC0415 - the simulator

    folders = [folder for run in runs for folder in _folders(run)]
    comparisons = []
    for folder in folders:
        measured = record.read(folder)
        other = _other(measured.case.cluster, cluster, changes or {})
        comparisons.append(compare(_name(folder, folders), measured, other))
    return comparisons


def _report(
    comparisons: Sequence["RunComparison"],
    files: dict[Path, bytes],
    *,
    csv: Path | None = None,
    as_json: bool = False,
) -> None:
    """Write the files, all or none; then print tables, or JSON."""
    from analysis.measured import op_table  # noqa: PLC0415 - pandas, only for these commands

    if csv is not None:
        files[csv] = op_table.to_csv(comparisons)
    write_atomically(files)
    if as_json:
        typer.echo(json.dumps(op_table.to_dict(comparisons), indent=2))
        return
    out = console()
    op_table.print_all(out, comparisons)
    for path in files:
        out.print(f"written {path}", highlight=False, markup=False, soft_wrap=True)


def _in_lab(lab_options: Sequence[str], command: Sequence[str]) -> None:
    """Run a command of `realrun` as every rank of a lab; what it prints is not shown."""
    program = [sys.executable, "-m", "realrun", "lab", "run", *lab_options, "--", "realrun"]
    lab_process = started([*program, *command], {}, output=subprocess.DEVNULL, errors=None)
    try:
        code = lab_process.wait()
    finally:
        if lab_process.poll() is None:
            lab_process.terminate()
            lab_process.wait()
    if code:
        raise typer.Exit(code)


def _page(
    comparisons: Sequence["RunComparison"],
    rank: int = 0,
    stated: Sequence[Fact] = (),
    changes: Sequence[str] = (),
) -> bytes:
    """The HTML page."""
    from analysis.measured.page import page  # noqa: PLC0415 - Altair
    from co2sim.report.html import render  # noqa: PLC0415 - as above

    return render(page(comparisons, command_line("co2analysis"), rank, stated, changes))


def _figures(comparisons: Sequence["RunComparison"], figure: Path, rank: int) -> dict[Path, bytes]:
    """The figure, or one per run, whose file name holds the name of the run."""
    from analysis.measured.charts import draw  # noqa: PLC0415 - Altair

    paths = [figure]
    if len(comparisons) > 1:
        parts = [comparison.name.replace("/", "-") for comparison in comparisons]
        paths = [figure.with_name(f"{figure.stem}-{part}{figure.suffix}") for part in parts]
    pairs = zip(paths, comparisons, strict=True)
    return {path: draw(comparison, rank, figure.suffix) for path, comparison in pairs}


def _folders(run: Path) -> list[Path]:
    """The run itself, or the runs one level below, by name."""
    if (run / "run.json").exists() or not run.is_dir():
        return [run]
    below = sorted(path.parent for path in run.glob("*/run.json"))
    if not below:
        raise OptionError(f"{run} holds no run: it has neither run.json nor a folder with one")
    return below


def _name(folder: Path, folders: list[Path]) -> str:
    """The name of the folder, with that of its parent where others are called the same."""
    whole = folder.resolve()
    same = [other for other in folders if other.resolve().name == whole.name]
    return whole.name if len(same) == 1 else f"{whole.parent.name}/{whole.name}"


def _other(recorded: Any, reference: str | None, changes: Mapping[str, str]) -> Cluster | None:
    """The cluster to predict on, if it is not the recorded one."""
    model = next((path for path in changes if path.startswith("model.")), None)
    if model is not None:
        raise OptionError(f"--set {model}: the model is that of the run; only the cluster varies")
    if reference is not None:
        return load_cluster(reference, changes).value
    return changed(recorded, changes) if changes else None
