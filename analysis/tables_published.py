"""Published cells from `papers/` and from CSV tables, as configurations to simulate.

Everything that a source leaves open is stated in the `[simulation]` table of its `paper.toml`.
"""

import csv
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.published import ONE_BUCKET, Cell, Setup, Term, Use
from co2sim.errors import CatalogError, OptionError

PAPERS = Path(__file__).parent.parent / "papers"
"""In a clone; an installed package has none, and needs `--papers`."""

_LINK_GBITS = 100
_SIZES = (18, 49, 91, 138)


@dataclass(frozen=True, slots=True)
class Paper:
    """One source: its key, what it says of itself, and how its runs are simulated."""

    key: str
    about: Mapping[str, Any]

    @property
    def simulation(self) -> Mapping[str, Any]:
        """The `[simulation]` table."""
        found: Mapping[str, Any] = self.about["simulation"]
        return found

    def strategy(self, text: str) -> str:
        """A strategy with the options that the source's framework gives it."""
        options = self.simulation.get("options", {})
        name = text.partition(":")[0].partition("(")[0]
        extra = options.get(name)
        if not extra:
            return text
        return f"{text},{extra}" if ":" in text else f"{text}:{extra}"


def papers(folder: Path = PAPERS) -> dict[str, Paper]:
    """All sources that say how to simulate their runs, by key."""
    found = {}
    for path in sorted(folder.glob("*/paper.toml")):
        about = tomllib.loads(path.read_text())
        if "simulation" in about:
            found[path.parent.name] = Paper(path.parent.name, about)
    if not found:
        raise OptionError(f"{folder} holds no papers; give their folder with --papers")
    return found


def from_papers(folder: Path = PAPERS) -> list[Cell]:
    """Every cell of `papers/` whose quantity the simulator predicts."""
    found = []
    for key, paper in papers(folder).items():
        path = folder / key / "results.toml"
        if path.exists():
            for row in tomllib.loads(path.read_text())["cell"]:
                make = _QUANTITIES.get(row["quantity"])
                if make and "cluster" in row:
                    found += make(paper, row)
    return found


def _links(cluster: str) -> int:
    return int(cluster.removeprefix("dgx2-ib"))


def zeropp_term(paper: Paper, size: int, tokens: int, links: int, strategy: str) -> Term:
    """Throughput of a model of `size` billion parameters at some micro-batch and links."""
    plan = paper.simulation
    setup = Setup(
        cluster=plan["cluster"],
        overrides=(("inter.bandwidth", f"{_LINK_GBITS * links} Gbit/s"),),
        model=f"gpt-{size}b",
        strategy=paper.strategy(strategy),
        gpus=plan["gpus"],
        precision=plan["precision"],
        micro_batch=max(1, tokens // plan["seq_len"]),
        recompute=plan["recompute"],
    )
    return Term(setup=setup, quantity="tflops_per_gpu")


def zeropp_cell(
    paper: Paper, size: int, tokens: int, links: int, strategy: str, value: float, use: Use
) -> Cell:
    """A bar of ZeRO++'s figures."""
    return Cell(
        source="zeropp",
        name=f"{size}B, {tokens} tokens, {links} x 100 Gbit/s, {strategy}",
        strategy=strategy,
        group="v100-zeropp",
        published=value,
        use=use,
        terms=(zeropp_term(paper, size, tokens, links, strategy),),
        rounding=1.0,
        labels={"size": f"{size}B", "tokens": str(tokens), "links": str(links)},
    )


def _tflops(paper: Paper, row: Mapping[str, Any]) -> list[Cell]:
    size = int(row["model"].removeprefix("gpt-").removesuffix("b"))
    links = _links(row["cluster"])
    value = float(row["value"])
    return [
        zeropp_cell(paper, size, row["tokens_per_gpu"], links, row["strategy"], value, row["use"])
    ]


def _speedup(paper: Paper, row: Mapping[str, Any]) -> list[Cell]:
    if "tokens_per_gpu" not in row:
        return []
    links, tokens = _links(row["cluster"]), row["tokens_per_gpu"]
    pick = "max" if row["quantity"].startswith("max") else "min"
    return [
        Cell(
            source="zeropp",
            name=f"{pick} speed-up over sizes, {tokens} tokens, {links} x 100 Gbit/s",
            strategy="zeropp / zero3",
            group="v100-zeropp",
            published=float(row["value"]),
            use=row["use"],
            terms=tuple(zeropp_term(paper, s, tokens, links, row["strategy"]) for s in _SIZES),
            over=tuple(zeropp_term(paper, s, tokens, links, row["baseline"]) for s in _SIZES),
            pick="max" if pick == "max" else "min",
            rounding=row.get("rounding", 0.0),
        )
    ]


def _ratio(paper: Paper, row: Mapping[str, Any]) -> list[Cell]:
    """In words: as fast as the baseline on another cluster."""
    size = int(row["model"].removeprefix("gpt-").removesuffix("b"))
    here, there = _links(row["cluster"]), _links(row["baseline_cluster"])
    tokens = 2048
    return [
        Cell(
            source="zeropp",
            name=f"{size}B, zeropp at {here} / zero3 at {there} x 100 Gbit/s, {tokens} tokens",
            strategy="zeropp / zero3",
            group="v100-zeropp",
            published=float(row["value"]),
            use=row["use"],
            terms=(zeropp_term(paper, size, tokens, here, row["strategy"]),),
            over=(zeropp_term(paper, size, tokens, there, row["baseline"]),),
            rounding=0.1,
        )
    ]


def co2_term(paper: Paper, strategy: str, gpus: int) -> Term:
    """Throughput of TransNormerLLM 7B."""
    plan = paper.simulation
    overrides = (("seq_len", str(plan["tokens_per_gpu"])),)
    setup = Setup(
        cluster=plan["cluster"],
        model=plan["model"],
        model_overrides=overrides,
        strategy=paper.strategy(strategy),
        gpus=gpus,
        precision=plan["precision"],
    )
    return Term(setup=setup, quantity="tokens_per_s")


def co2_cell(paper: Paper, strategy: str, gpus: int, value: float, use: Use) -> Cell:
    """A throughput of CO2's table."""
    return Cell(
        source="co2",
        name=f"7B, {gpus} GPUs, {strategy}",
        strategy=strategy.partition(",")[0],
        group="a100-co2",
        published=value,
        use=use,
        terms=(co2_term(paper, strategy, gpus),),
        labels={"gpus": str(gpus)},
    )


def co2_ratio(paper: Paper, strategy: str, sizes: tuple[int, int], value: float, use: Use) -> Cell:
    """A scalability ratio of CO2's table."""
    small, large = sizes
    return Cell(
        source="co2",
        name=f"7B, {small} to {large} GPUs, ratio, {strategy}",
        strategy=strategy.partition(",")[0],
        group="a100-co2",
        published=value,
        use=use,
        terms=(co2_term(paper, strategy, large),),
        over=(co2_term(paper, strategy, small),),
        per_gpu=True,
        rounding=0.01,
    )


def _throughput(paper: Paper, row: Mapping[str, Any]) -> list[Cell]:
    return [co2_cell(paper, row["strategy"], row["gpus"], float(row["value"]), row["use"])]


def _scalability(paper: Paper, row: Mapping[str, Any]) -> list[Cell]:
    sizes = row["from_gpus"], row["to_gpus"]
    return [co2_ratio(paper, row["strategy"], sizes, float(row["value"]), row["use"])]


_QUANTITIES: dict[str, Callable[[Paper, Mapping[str, Any]], list[Cell]]] = {
    "tflops_per_gpu": _tflops,
    "tokens_per_s": _throughput,
    "scalability_ratio": _scalability,
    "max_speedup": _speedup,
    "min_speedup": _speedup,
    "throughput_ratio": _ratio,
}


def iteration_setup(paper: Paper, row: Mapping[str, str]) -> Setup:
    """The run behind a row of the iteration times."""
    plan = paper.simulation
    hidden = int(row["hidden"])
    shape = {
        "layers": row["layers"],
        "hidden": row["hidden"],
        "heads": row["heads"],
        "ffn": str(4 * hidden),
        "vocab": str(plan["vocab"]),
        "positions": row["seq_len"],
        "seq_len": row["seq_len"],
    }
    gpus, micro = int(row["gpus"]), int(row["micro_batch"])
    steps, left = divmod(int(row["global_batch"]), gpus * micro)
    if left or not steps:
        raise CatalogError(f"global batch {row['global_batch']} is no multiple of {gpus} x {micro}")
    return Setup(
        cluster=plan["cluster"],
        model=plan["model"],
        model_overrides=tuple(shape.items()),
        strategy=ONE_BUCKET,
        gpus=gpus,
        precision=plan["precision"],
        micro_batch=micro,
        accumulation=steps,
        recompute=plan["recompute"],
    )


def from_csv(path: Path, use: Use, folder: Path = PAPERS) -> list[Cell]:
    """The cells of a table in one of the three formats of the published data.

    Raises CatalogError for a table in no known format, or a row that cannot be read.
    """
    sources = papers(folder)
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogError(f"cannot read {path}: {error}") from error
    columns = set(rows[0]) if rows else set()
    for needed, source, read in _FORMATS:
        if needed <= columns:
            found = []
            for number, row in enumerate(rows, start=2):
                try:
                    found += list(read(sources[source], row, use))
                except (KeyError, ValueError, TypeError) as error:
                    raise CatalogError(f"{path}, line {number}: {error}") from error
            return found
    known = "; or ".join(", ".join(sorted(needed)) for needed, _, _ in _FORMATS)
    raise CatalogError(f"{path} holds no known table; expected the columns {known}")


def _zeropp_row(paper: Paper, row: Mapping[str, str], use: Use) -> Iterator[Cell]:
    for strategy in ("zero3", "zeropp"):
        value = row[f"{strategy}_tflops_per_gpu"]
        if value:
            yield zeropp_cell(
                paper,
                int(row["model_params_b"]),
                int(row["tokens_per_gpu"]),
                int(row["ib_links_100gbps_per_node"]),
                strategy,
                float(value),
                use,
            )


def _co2_row(paper: Paper, row: Mapping[str, str], use: Use) -> Iterator[Cell]:
    strategy = paper.simulation["methods"][row["method"]]
    if row["tau"]:
        strategy = strategy.replace("TAU", row["tau"])
    gpus = int(row["gpus"])
    fit = use == "fit" and row["method"] == "adamw_zero2" and gpus in {8, 16}
    if row["words_per_s"]:
        value = float(row["words_per_s"])
        yield co2_cell(paper, strategy, gpus, value, "fit" if fit else "check")
    if row["scalability_16_to_128"]:
        value = float(row["scalability_16_to_128"])
        yield co2_ratio(paper, strategy, (16, 128), value, "check")


def _iteration_row(paper: Paper, row: Mapping[str, str], use: Use) -> Iterator[Cell]:
    name = (
        f"{row['gpus']} GPUs, batch {row['global_batch']}, micro-batch {row['micro_batch']},"
        f" hidden {row['hidden']}, {row['layers']} layers"
    )
    yield Cell(
        source="vtrain",
        name=name,
        strategy="ddp",
        group="a100-data-parallel",
        published=float(row["iteration_ms"]),
        use=use,
        terms=(Term(setup=iteration_setup(paper, row), quantity="iteration_ms"),),
        labels={key: row[key] for key in ("gpus", "micro_batch", "hidden", "layers")},
    )


_FORMATS: tuple[
    tuple[set[str], str, Callable[[Paper, Mapping[str, str], Use], Iterator[Cell]]], ...
] = (
    ({"model_params_b", "tokens_per_gpu", "ib_links_100gbps_per_node"}, "zeropp", _zeropp_row),
    ({"method", "tau", "gpus", "words_per_s"}, "co2", _co2_row),
    ({"gpus", "global_batch", "micro_batch", "hidden", "iteration_ms"}, "vtrain", _iteration_row),
)
