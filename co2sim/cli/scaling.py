"""`co2sim scale`: strategies over GPU counts, as tables, a CSV file and a figure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import pandas as pd
from rich.console import Console

from co2sim.case import Case
from co2sim.catalog import load_cluster
from co2sim.cli.batch import run_all
from co2sim.cli.figure import draw
from co2sim.cli.published import Comparison, cases_of, compare, load_cells
from co2sim.console.result_tables import print_assumed
from co2sim.console.tables import console, print_lines, print_table
from co2sim.errors import OptionError
from co2sim.files import write_atomically
from co2sim.metrics import scalability_ratio
from co2sim.result import Result
from co2sim.strategies import parse_whole
from co2sim.units import scaled


def counts(text: str | None, cluster: str, overrides: Mapping[str, str]) -> list[int]:
    """GPU counts: those given, or one node doubled up to the whole cluster, where sites divide."""
    if text is not None:
        given = [parse_whole("--gpus", part.strip()) for part in text.split(",")]
        if len(set(given)) < len(given):
            raise OptionError(f"--gpus {text}: a count is given twice")
        return sorted(given)
    changes = {path: value for path, value in overrides.items() if not path.startswith("model.")}
    found = load_cluster(cluster, changes).value
    count, most = found.gpus_per_node, found.layout.world_size
    doubled = []
    while count < most:
        nodes = count // found.gpus_per_node
        doubled += [count] if nodes % min(found.sites, nodes) == 0 else []
        count *= 2
    return [*doubled, most]


def scale(
    cases: Sequence[Case], published: Path | None, out: Path, jobs: int, *, as_json: bool
) -> None:
    """Simulate all cases, write scale.csv, scale.png and scale.svg into `out`, and print."""
    cells = load_cells(published) if published else []
    everything = [*cases, *cases_of(cells, cases)]
    found = run_all(everything, jobs)
    results = found[: len(cases)]
    comparisons = compare(cells, everything, found)
    frame = to_frame(cases, results)
    figures = draw(cases, results, comparisons)
    files = {out / "scale.csv": frame.to_csv(index=False).encode()}
    files |= {out / f"scale.{kind}": content for kind, content in figures.items()}
    write_atomically(files)
    if as_json:
        report = {
            "results": [
                {"cluster_key": str(case.cluster), **result.to_dict()}
                for case, result in zip(cases, results, strict=True)
            ],
            "published": [
                {**asdict(c.cell), "predicted": c.predicted, "error": c.error} for c in comparisons
            ],
            "files": [str(path) for path in files],
        }
        print(json.dumps(report, indent=2))
        return
    terminal = console()
    for cluster, group in groupby(
        zip(cases, results, strict=True), key=lambda pair: pair[0].cluster
    ):
        _print_cluster(terminal, str(cluster), [result for _, result in group])
    if comparisons:
        _print_published(terminal, comparisons)
    elif published:
        what = "tokens_per_s or scalability_ratio of these clusters and this model"
        print_lines(terminal, f"no cell of {published} is a {what}", "")
    print_assumed(terminal, results)
    print_lines(
        terminal,
        f"table   {out / 'scale.csv'}",
        f"figure  {out / 'scale.png'}, {out / 'scale.svg'}",
    )


def to_frame(cases: Sequence[Case], results: Sequence[Result]) -> pd.DataFrame:
    """One row per case; memory items in columns of their own."""
    rows = []
    for case, result in zip(cases, results, strict=True):
        row = {"cluster_key": str(case.cluster), "model_key": str(case.model), **result.to_dict()}
        memory = row.pop("memory_bytes_per_gpu")
        for name in ("assumed", "breakdown_s"):
            del row[name]
        rows.append(row | {f"memory_{item}_bytes": size for item, size in memory.items()})
    return pd.DataFrame(rows)


def _print_cluster(terminal: Console, cluster: str, results: Sequence[Result]) -> None:
    sizes = sorted({result.gpus for result in results})
    first = results[0]
    starts = sizes[: 2 if len(sizes) > 2 else 1] if len(sizes) > 1 else []  # noqa: PLR2004
    columns = [
        "strategy",
        *(str(size) for size in sizes),
        *(f"{start}->{sizes[-1]}" for start in starts),
        f"exposed at {sizes[-1]}",
        f"memory at {sizes[-1]}",
    ]
    rows = []
    for strategy, group in groupby(results, key=lambda result: result.strategy):
        by_size = {result.gpus: result for result in group}
        last = by_size[sizes[-1]]
        ratios = [
            scalability_ratio(last.tokens_per_s_per_gpu, by_size[start].tokens_per_s_per_gpu)
            for start in starts
        ]
        rows.append(
            [
                strategy,
                *(_throughput(by_size[size]) for size in sizes),
                *(f"{ratio:.2f}" for ratio in ratios),
                f"{last.exposed_share:.1%}",
                scaled(last.memory_bytes_per_gpu["total"], "B"),
            ]
        )
    title = (
        f"{cluster}: {first.model}, {first.unit}s/s per GPU by number of GPUs;"
        f" {first.tokens_per_gpu_per_step:,} {first.unit}s per GPU and step, {first.precision}"
    )
    print_table(terminal, title, columns, rows)
    notes = ["a->b: throughput per GPU at b, relative to that at a"] if starts else []
    if not all(result.fits_in_memory for result in results):
        size = scaled(first.gpu_memory_bytes, "B")
        notes.append(f"* does not fit in the {size} of a GPU: shown as if it did")
    print_lines(terminal, *notes, "")


def _throughput(result: Result) -> str:
    return f"{result.tokens_per_s_per_gpu:,.0f}{'' if result.fits_in_memory else '*'}"


def _print_published(terminal: Console, comparisons: Sequence[Comparison]) -> None:
    columns = ("strategy", "quantity", "GPUs", "published", "predicted", "error", "use")
    for cluster, group in groupby(comparisons, key=lambda c: c.cell.cluster):
        rows = [
            (
                c.cell.strategy,
                c.cell.quantity.replace("_per_s", "/s").replace("_", " "),
                "->".join(map(str, c.cell.sizes)),
                _number(c.cell.value),
                _number(c.predicted),
                f"{c.error:+.0%}",
                c.cell.use,
            )
            for c in group
        ]
        print_table(terminal, f"{cluster}: published beside predicted", columns, rows, left=2)
    print_lines(terminal, *dict.fromkeys(c.cell.note for c in comparisons if c.cell.note), "")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"  # noqa: PLR2004
