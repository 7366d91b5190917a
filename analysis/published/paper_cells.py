"""Published cells of `papers/` as configurations to simulate."""

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from analysis.published.papers import PAPERS, Paper, papers
from analysis.published.predict import Cell, Setup, Term, Use
from co2sim.errors import OptionError

_LINK_GBITS = 100
SIZES = (18, 49, 91, 138)
"""Of the models of ZeRO++, in billions of parameters."""

_SHAPE_KNOWN = 18
"""The one model of ZeRO++ whose shape is published."""


@dataclass(frozen=True, slots=True)
class Unpredicted:
    """A published cell that is not predicted, and why, in a word."""

    source: str
    name: str
    published: float
    reason: str


def from_papers(folder: Path = PAPERS) -> list[Cell]:
    """Every cell of `papers/` that is predicted."""
    return [found for found in _read(folder) if isinstance(found, Cell)]


def unpredicted(folder: Path = PAPERS) -> list[Unpredicted]:
    """Every other cell of `papers/`."""
    return [found for found in _read(folder) if isinstance(found, Unpredicted)]


def _read(folder: Path) -> Iterator[Cell | Unpredicted]:
    for key, paper in papers(folder).items():
        path = folder / key / "results.toml"
        for row in tomllib.loads(path.read_text())["cell"] if path.exists() else ():
            found = _QUANTITIES[row["quantity"]](paper, row)
            if isinstance(found, Cell):
                yield found
            else:
                parts = [row["quantity"].replace("_", " ")]
                parts += [row[name] for name in ("part", "model", "strategy") if name in row]
                yield Unpredicted(key, ", ".join(parts), float(row["value"]), found)


def _links(cluster: str) -> int:
    return int(cluster.removeprefix("dgx2-ib"))


def zeropp_term(paper: Paper, size: int, tokens: int, links: int, strategy: str) -> Term:
    """Throughput of a model of `size` billion parameters at some micro-batch and links."""
    plan = paper.simulation
    micro_batch, left = divmod(tokens, plan["seq_len"])
    if left or micro_batch < 1:
        raise OptionError(f"{tokens} tokens are no multiple of sequences of {plan['seq_len']}")
    setup = Setup(
        cluster=plan["cluster"],
        overrides=(("inter.bandwidth", f"{_LINK_GBITS * links} Gbit/s"),),
        model=f"gpt-{size}b",
        strategy=paper.strategy(strategy),
        gpus=plan["gpus"],
        precision=plan["precision"],
        micro_batch=micro_batch,
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


def _tflops(paper: Paper, row: Mapping[str, Any]) -> Cell:
    size = int(row["model"].removeprefix("gpt-").removesuffix("b"))
    links = _links(row["cluster"])
    value = float(row["value"])
    return zeropp_cell(
        paper, size, row["tokens_per_gpu"], links, row["strategy"], value, row["use"]
    )


def _speedup(paper: Paper, row: Mapping[str, Any]) -> Cell | str:
    if "cluster" not in row:
        return "network and micro-batch not stated"
    if "tokens_per_gpu" not in row:
        return "a ratio of cells marked fit"
    links, tokens = _links(row["cluster"]), row["tokens_per_gpu"]
    pick = "max" if row["quantity"].startswith("max") else "min"
    return Cell(
        source="zeropp",
        name=f"{pick} speed-up over sizes, {tokens} tokens, {links} x 100 Gbit/s",
        strategy="zeropp / zero3",
        group="v100-zeropp",
        published=float(row["value"]),
        use=row["use"],
        terms=tuple(zeropp_term(paper, s, tokens, links, row["strategy"]) for s in SIZES),
        over=tuple(zeropp_term(paper, s, tokens, links, row["baseline"]) for s in SIZES),
        pick="max" if pick == "max" else "min",
        rounding=row.get("rounding", 0.0),
    )


def _ratio(paper: Paper, row: Mapping[str, Any]) -> Cell:
    """In words: as fast as the baseline on another cluster."""
    size = int(row["model"].removeprefix("gpt-").removesuffix("b"))
    here, there = _links(row["cluster"]), _links(row["baseline_cluster"])
    tokens = 2048
    return Cell(
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


def _volume(paper: Paper, row: Mapping[str, Any]) -> Cell | str:
    if not row["value"]:
        return "an error relative to zero"
    term = zeropp_term(paper, _SHAPE_KNOWN, paper.simulation["seq_len"], 1, row["strategy"])
    part = row["part"]
    return Cell(
        source="zeropp-volume",
        name=f"{_SHAPE_KNOWN}B, {part.replace('_', ' ')}, {row['strategy']}",
        strategy=row["strategy"],
        group="zeropp-volume",
        published=float(row["value"]),
        use=row["use"],
        terms=(replace(term, quantity="inter_node_volume", part=part),),
    )


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


def _throughput(paper: Paper, row: Mapping[str, Any]) -> Cell:
    return co2_cell(paper, row["strategy"], row["gpus"], float(row["value"]), row["use"])


def _scalability(paper: Paper, row: Mapping[str, Any]) -> Cell:
    sizes = row["from_gpus"], row["to_gpus"]
    return co2_ratio(paper, row["strategy"], sizes, float(row["value"]), row["use"])


def _quality(_paper: Paper, _row: Mapping[str, Any]) -> str:
    return "quality of training"


_QUANTITIES: dict[str, Callable[[Paper, Mapping[str, Any]], Cell | str]] = {
    "tflops_per_gpu": _tflops,
    "tokens_per_s": _throughput,
    "scalability_ratio": _scalability,
    "max_speedup": _speedup,
    "min_speedup": _speedup,
    "throughput_ratio": _ratio,
    "inter_node_volume_ratio": _volume,
    "top1_accuracy_percent": _quality,
    "perplexity": _quality,
}
"""A cell, or why it is not predicted."""
