"""What `benchmarks/gpu/run.sh` measured on one GPU, beside what co2sim predicts of it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import StatisticsError, fmean
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, ValidationError

from co2sim.catalog import load_cluster, load_model, load_stack
from co2sim.common.errors import CatalogError
from co2sim.common.files import text_of
from co2sim.common.units import Seconds, duration, scaled
from co2sim.common.validation import first_problem
from co2sim.hardware.cluster import Cluster
from co2sim.prediction.driver import simulate
from co2sim.schedule.schedule import Compute, Kernels
from co2sim.simulation.costs import compute_time, kernel_time
from co2sim.training.memory import OVERHEAD, kept_bytes
from co2sim.training.workload import Workload

Section: TypeAlias = Sequence[Mapping[str, Any]]

_COMPARED = {"H100": "dgx-h100", "H200": "dgx-h200", "B200": "dgx-b200", "A100": "a100-roce800"}
"""Clusters of the catalog to predict with, by what the name of a GPU contains."""

_STACKS = "torchtitan-eager", "composer-2023"
"""Stacks whose kernels are compared: what is measured is not compiled."""


@dataclass(frozen=True, slots=True)
class Table:
    """A title, what it says in a sentence, names of columns, and rows of texts."""

    title: str
    about: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Measured(BaseModel):
    """What a gpu.json holds: rows by section, in SI units; `clusters` are those to predict with."""

    model_config = ConfigDict(frozen=True)

    format: Literal[1]
    date: str
    commit: str
    quick: bool
    machine: dict[str, Any]
    failures: dict[str, str]
    sections: dict[str, list[dict[str, Any]]]
    clusters: tuple[str, ...] = ()


def read(path: Path, clusters: Sequence[str] = ()) -> Measured:
    """Read a gpu.json, or the one in a folder; `clusters` are those to predict with.

    Raises CatalogError for what is no such file.
    """
    path = path / "gpu.json" if path.is_dir() else path
    try:
        measured = Measured.model_validate_json(text_of(path))
    except OSError as error:
        raise CatalogError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        raise CatalogError(
            f"{path} is no gpu.json of benchmarks/gpu/run.sh: {first_problem(error)}"
        ) from None
    except ValueError as error:
        raise CatalogError(f"{path} is no text: {error}") from None
    name = str(measured.machine.get("gpu"))
    usual = [cluster for kind, cluster in _COMPARED.items() if kind in name][:1]
    return measured.model_copy(update={"clusters": tuple(clusters or usual)})


def tables(measured: Measured) -> list[Table]:
    """All tables; those of sections that were not measured are left out.

    Raises CatalogError for rows that lack a number, and what `load_cluster` raises.
    """
    # By the name that the user knows, which is short.
    clusters = [
        replace(load_stack(stack).value.within(load_cluster(name).value), name=f"{name}, {stack}")
        for name in measured.clusters
        for stack in _STACKS
    ]
    makers: dict[str, Callable[[Section, Sequence[Cluster]], Table]] = {
        "rates": _rates,
        "products": _products,
        "layers": _layers,
        "training": _training,
        "codes": _codes,
        "averages": _averages,
        "sleeps": _sleeps,
    }
    lines = []
    for name, make in makers.items():
        rows = measured.sections.get(name)
        if not rows:
            continue
        try:
            lines.append(make(rows, clusters))
            if name == "layers":
                lines += [_kernels(rows, clusters), _kept(rows)]
            if name == "training":
                lines.append(_memory(rows, clusters))
        except (KeyError, TypeError, ZeroDivisionError, StatisticsError) as error:
            raise CatalogError(
                f"the section {name!r} lacks what this version reads:"
                f" {type(error).__name__} ({error})"
            ) from None
    return lines


def heading(measured: Measured) -> list[str]:
    """What it was measured on, in lines."""
    machine = measured.machine
    gpu = machine.get("gpu") or "no GPU: a dry run on a CPU, whose times mean nothing"
    versions = [
        f"{name} {machine[name]}"
        for name in ("torch", "cuda", "nccl", "triton", "python")
        if name in machine
    ]
    lines = [f"{gpu}; {', '.join(versions)}; {measured.date}, {measured.commit}"]
    if measured.quick:
        lines.append("Shapes were tiny: the times mean nothing.")
    if measured.clusters:
        lines.append(f"Predicted with {', '.join(measured.clusters)}.")
    lines += [f"{name} failed: {error}" for name, error in measured.failures.items()]
    return lines


def markdown(measured: Measured) -> str:
    """The page."""
    parts = ["# One GPU, measured and predicted", *heading(measured)]
    for table in tables(measured):
        lines = [_line(table.columns), _line(["---"] * len(table.columns))]
        lines += [_line(row) for row in table.rows]
        parts += [f"## {table.title}", table.about, "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rates(rows: Section, clusters: Sequence[Cluster]) -> Table:
    lines = []
    for row in rows:
        rate, stated = "", ""
        if "bytes" in row:
            rate = scaled(row["bytes"] / row["seconds"], "B/s")
            stated = ", ".join(
                scaled(cluster.gpu.memory_bandwidth, "B/s") for cluster in clusters[:1]
            )
        if "flops" in row:
            rate = scaled(row["flops"] / row["seconds"], "FLOP/s")
            peaks = [cluster.gpu.peak.get(row["precision"]) for cluster in clusters[:1]]
            stated = ", ".join(scaled(peak, "FLOP/s") for peak in peaks if peak)
        what = " ".join([row["what"], row.get("precision", "")]).strip()
        lines.append((what, duration(row["seconds"]), rate, stated))
    columns = ("what", "time", "rate", "stated by its maker")
    return Table("Rates", "A copy reads and writes every byte.", columns, tuple(lines))


def _products(rows: Section, clusters: Sequence[Cluster]) -> Table:
    lines = []
    for row in rows:
        sides = row["rows"], row["inner"], row["columns"]
        flops, size = 2.0 * math.prod(sides), " x ".join(map(str, sides))
        moved = 2 * sum(side * other for side, other in combinations(sides, 2))
        work = Compute("product", flops, moved)
        errors = [
            _error(compute_time(work, cluster.gpu, "bf16"), row["seconds"]) for cluster in clusters
        ]
        speed = scaled(flops / row["seconds"], "FLOP/s")
        lines.append((row["model"], size, row["pass"], duration(row["seconds"]), speed, *errors))
    columns = ("model", "rows x inner x columns", "pass", "time", "speed", *_named(clusters))
    about = "Products of a layer with weights, in bf16. Errors are those of a work of this size."
    return Table("Matrix products", about, columns, tuple(lines))


def _job(row: Mapping[str, Any]) -> Workload:
    return Workload(load_model(row["model"]).value, micro_batch=row["samples"])


def _layers(rows: Section, clusters: Sequence[Cluster]) -> Table:
    lines = []
    for row in rows:
        work = _job(row).works()[1]
        passes = (work.forward, row["forward"]), (work.backward, row["both"] - row["forward"])
        errors = [
            ", ".join(
                _error(row["layers"] * compute_time(each, cluster.gpu, "bf16"), seconds)
                for each, seconds in passes
                if "fp8" not in row["kind"]
            )
            for cluster in clusters
        ]
        speed = row["layers"] * (work.forward.flops + work.backward.flops) / row["both"]
        lines.append(
            (
                f"{row['model']}, {row['samples']} x {row['tokens']}",
                row["kind"],
                str(row["layers"]),
                duration(row["forward"]),
                duration(row["both"] - row["forward"]),
                duration(row["issued"]),
                scaled(speed, "FLOP/s"),
                *errors,
            )
        )
    columns = ("model, samples x tokens", "kind", "layers", "forward", "backward", "issue")
    about = (
        "Passes over one layer and over four. The host needs the time `issue` to issue both. The"
        " speed counts all scores of attention. Errors are those of forward and backward pass."
    )
    return Table("Layers", about, (*columns, "speed", *_named(clusters)), tuple(lines))


_PARTS = ("matrix products", "attention", "elementwise")


def _kernels(rows: Section, clusters: Sequence[Cluster]) -> Table:
    """Seconds of a layer by kind of kernel; predicted only where a GPU's kernels are known."""
    lines = []
    fitted = [cluster for cluster in clusters if cluster.gpu.kernels]
    for row in rows:
        if not row.get("kernels") or "fp8" in row["kind"]:
            continue
        work = _job(row).works()[1]
        for part in _PARTS:
            seen = row["kernels"].get(part)
            if not seen:
                continue
            errors = [
                _error(
                    sum(
                        _of_part(passed, part, cluster) for passed in (work.forward, work.backward)
                    ),
                    seen["seconds"],
                )
                for cluster in fitted
            ]
            name, kind = row["model"], row["kind"]
            lines.append((name, kind, part, duration(seen["seconds"]), str(seen["count"]), *errors))
    columns = ("model", "kind", "kernels", "time", "number", *_named(fitted))
    about = "Kernels of a forward and a backward pass over one layer, and the error of each part."
    return Table("Kernels", about, columns, tuple(lines))


def _of_part(work: Compute, part: str, cluster: Cluster) -> Seconds:
    """What is predicted for some of the kernels of a pass."""
    kernels, gpu = work.kernels, cluster.gpu
    if kernels is None or gpu.kernels is None:
        return 0.0
    some: dict[str, Kernels] = {
        "matrix products": replace(kernels, calls=0, elementwise_bytes=0.0, attention=None),
        "attention": replace(kernels, calls=0, elementwise_bytes=0.0, products=()),
        "elementwise": replace(kernels, calls=0, products=(), attention=None),
    }
    return kernel_time(some[part], gpu, gpu.kernels, "bf16")


def _kept(rows: Section) -> Table:
    lines = []
    for row in rows:
        job = _job(row)
        predicted = row["layers"] * kept_bytes(job, job.executed[1][1])
        kept = row["kept_bytes"]
        error = _error(predicted, kept) if kept else ""
        name, count = row["model"], str(row["layers"])
        lines.append((name, row["kind"], count, scaled(kept, "B"), error))
    columns = ("model", "kind", "layers", "kept", "predicted is off by")
    about = "What a layer keeps for its backward pass."
    return Table("Activations", about, columns, tuple(lines))


def _training(rows: Section, clusters: Sequence[Cluster]) -> Table:
    lines = []
    for row in rows:
        errors = [
            _error(_simulated(row, cluster).step_time_s, row["seconds"]) for cluster in clusters
        ]
        rate = row["samples"] * row["tokens"] / row["seconds"]
        what = f"{row['model']}, {row['samples']} x {row['tokens']}"
        lines.append((what, row["kind"], duration(row["seconds"]), f"{rate:,.0f}", *errors))
    columns = ("model, samples x tokens", "kind", "step", "tokens/s", *_named(clusters))
    about = "Training steps with AdamW: fp32 parameters, autocast to bf16."
    return Table("Training steps", about, columns, tuple(lines))


def _memory(rows: Section, clusters: Sequence[Cluster]) -> Table:
    lines = []
    for row in rows:
        if "reserved_bytes" not in row:
            continue
        items = _simulated(row, clusters[0]).memory_bytes_per_gpu if clusters else {}
        allocated = sum(size for key, size in items.items() if key not in (*OVERHEAD, "total"))
        sizes = [row["states_bytes"], row["peak_bytes"], row["reserved_bytes"], row["used_bytes"]]
        pairs = ((allocated, "peak_bytes"), (items.get("total", 0.0), "used_bytes"))
        errors = [_error(size, row[key]) if items else "" for size, key in pairs]
        lines.append((row["model"], row["kind"], *(scaled(size, "B") for size in sizes), *errors))
    columns = ("model", "kind", "states", "peak", "reserved", "used of the GPU")
    about = (
        "Memory of training steps. States are without gradients. Errors are those of what PyTorch"
        " allocated at most, and of what the GPU had in use."
    )
    return Table("Memory", about, (*columns, "error of peak", "of used"), tuple(lines))


def _simulated(row: Mapping[str, Any], cluster: Cluster) -> Any:
    """Training on one GPU of the cluster."""
    return simulate(
        replace(cluster, nodes=1, gpus_per_node=1, sites=1),
        row["model"],
        "ddp",
        gpus=1,
        micro_batch=row["samples"],
        accumulation=1,
        recompute="full" if "recomputed" in row["kind"] else "none",
        loss="eager",
        progress=False,
    )


def _codes(rows: Section, _: Sequence[Cluster]) -> Table:
    lines = []
    for row in rows:
        rate = scaled(row["bytes"] / row["seconds"], "B/s")
        same = "yes" if row["same bits"] else "NO"
        what = (row["what"], f"int{row['bits']}", str(row["block"]))
        lines.append((*what, duration(row["seconds"]), rate, same))
    columns = ("what", "code", "block", "time", "bytes moved", "same bits as on a CPU")
    about = "Quantization of 134 million elements of bf16 by this library's kernels."
    return Table("Quantization", about, columns, tuple(lines))


def _averages(rows: Section, _: Sequence[Cluster]) -> Table:
    base = fmean(row["seconds"] for row in rows if not row["options"])
    lines = []
    for row in rows:
        options = ", ".join(f"{key}={value}" for key, value in row["options"].items())
        more = f"{100 * (row['seconds'] / base - 1):+.1f} %"
        host = (duration(row["host"]), f"{row['waits']:.2f}")
        waited = duration(row["waited"]) if "waited" in row else ""
        averages = (str(row.get("late", "")), waited)
        memory = scaled(row["memory_bytes"], "B")
        step = duration(row["seconds"])
        lines.append((row["algorithm"], options, step, more, *host, *averages, memory))
    columns = ("algorithm", "options", "step", "longer by", "host in step()", "waits of the host")
    about = (
        "Steps of GPT-2 small in bf16, with averages through one rank of the communicator. Waits"
        " are synchronizations with the GPU that PyTorch reports, per step."
    )
    return Table("Averages", about, (*columns, "late", "waited", "peak memory"), tuple(lines))


def _sleeps(rows: Section, _: Sequence[Cluster]) -> Table:
    lines = []
    for row in rows:
        wanted, held = row["asked"], row["seconds"]
        lines.append((row["after"], duration(wanted), duration(held), _error(held, wanted)))
    columns = ("after", "asked", "held", "longer by")
    return Table("Held streams", "Kernels that sleep.", columns, tuple(lines))


def _named(clusters: Sequence[Cluster]) -> Iterator[str]:
    return (f"error, {cluster.name}" for cluster in clusters)


def _error(predicted: float, measured: float) -> str:
    return f"{100 * (predicted / measured - 1):+.0f} %"
