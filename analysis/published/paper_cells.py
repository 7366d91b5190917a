"""Published cells of `papers/` as configurations to simulate."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from analysis.published.cells import Cell, RunSetup, Term
from analysis.published.papers import PAPERS, Paper, papers
from co2sim.errors import CatalogError, OptionError
from co2sim.published_cells import (
    AnyCell,
    QualityCell,
    ScalabilityCell,
    SpeedupCell,
    TflopsCell,
    ThroughputCell,
    ThroughputRatioCell,
    Use,
    VolumeCell,
    read_cells,
)
from co2sim.strategies import parse

SIZES = (18, 49, 91, 138)
"""Of the models of ZeRO++, in billions of parameters."""

_LINK_GBITS = 100

_SHAPE_KNOWN = 18
"""The one model of ZeRO++ whose shape is published."""

_RATIO_TOKENS = 2048
"""Tokens per GPU of the figure that states ratios in words."""

_RATIO_ROUNDING = 0.1
"""What "similar throughput" leaves open."""


@dataclass(frozen=True, slots=True)
class Unpredicted:
    """A published cell that is not predicted, and why, in a few words."""

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
        for row in read_cells(path) if path.exists() else ():
            found = _converted(paper, row)
            if isinstance(found, Cell):
                yield found
            else:
                parts = [row.quantity.replace("_", " ")]
                parts += [getattr(row, name, None) or "" for name in ("part", "model", "strategy")]
                yield Unpredicted(key, ", ".join(part for part in parts if part), row.value, found)


def _converted(paper: Paper, row: AnyCell) -> Cell | str:
    """A cell, or why it is not predicted."""
    found: Cell | str
    match row:
        case TflopsCell():
            size, links = _size(row.model), _links(row.cluster)
            tokens = row.tokens_per_gpu
            found = zeropp_cell(paper, size, tokens, links, row.strategy, row.value, row.use)
        case ThroughputCell():
            found = co2_cell(paper, row.strategy, row.gpus, row.value, row.use)
        case ScalabilityCell():
            sizes = row.from_gpus, row.to_gpus
            found = co2_ratio(paper, row.strategy, sizes, row.value, row.use)
        case SpeedupCell():
            found = _speedup(paper, row)
        case ThroughputRatioCell():
            found = _throughput_ratio(paper, row)
        case VolumeCell():
            found = _volume(paper, row)
        case QualityCell():
            found = "quality of training"
    return found


def _size(model: str) -> int:
    """Billions of parameters of one of ZeRO++'s models, `gpt-18b` for 18."""
    return _number(model, "gpt-", "b")


def _links(cluster: str) -> int:
    """InfiniBand links of one of ZeRO++'s clusters, `dgx2-ib8` for 8."""
    return _number(cluster, "dgx2-ib", "")


def _number(name: str, before: str, after: str) -> int:
    text = name.removeprefix(before).removesuffix(after)
    if not (text.isascii() and text.isdigit()):
        raise CatalogError(
            f"{name!r} is not a name of ZeRO++'s table: it must be {before}NUMBER{after}"
        )
    return int(text)


def zeropp_term(paper: Paper, size: int, tokens: int, links: int, strategy: str) -> Term:
    """Throughput of a model of `size` billion parameters at some micro-batch and links."""
    length = paper.setting("seq_len")
    micro_batch, left = divmod(tokens, length)
    if left or micro_batch < 1:
        raise OptionError(f"{tokens} tokens are not a multiple of sequences of {length}")
    setup = RunSetup(
        cluster=paper.setting("cluster"),
        overrides=(("inter.bandwidth", f"{_LINK_GBITS * links} Gbit/s"),),
        model=f"gpt-{size}b",
        strategy=parse(paper.strategy(strategy)),
        gpus=paper.setting("gpus"),
        precision=paper.setting("precision"),
        micro_batch=micro_batch,
        recompute=paper.setting("recompute"),
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


def _speedup(paper: Paper, row: SpeedupCell) -> Cell | str:
    if row.cluster is None:
        return "network and micro-batch not stated"
    if row.tokens_per_gpu is None:
        return "a ratio of cells marked fit"
    links, tokens = _links(row.cluster), row.tokens_per_gpu
    pick = "max" if row.quantity == "max_speedup" else "min"
    return Cell(
        source="zeropp",
        name=f"{pick} speed-up over sizes, {tokens} tokens, {links} x 100 Gbit/s",
        strategy="zeropp / zero3",
        group="v100-zeropp",
        published=row.value,
        use=row.use,
        terms=tuple(zeropp_term(paper, size, tokens, links, row.strategy) for size in SIZES),
        over=tuple(zeropp_term(paper, size, tokens, links, row.baseline) for size in SIZES),
        pick="max" if pick == "max" else "min",
        rounding=row.rounding,
    )


def _throughput_ratio(paper: Paper, row: ThroughputRatioCell) -> Cell:
    """In words: as fast as the baseline on another cluster."""
    size, tokens = _size(row.model), _RATIO_TOKENS
    here, there = _links(row.cluster), _links(row.baseline_cluster)
    return Cell(
        source="zeropp",
        name=f"{size}B, zeropp at {here} / zero3 at {there} x 100 Gbit/s, {tokens} tokens",
        strategy="zeropp / zero3",
        group="v100-zeropp",
        published=row.value,
        use=row.use,
        terms=(zeropp_term(paper, size, tokens, here, row.strategy),),
        over=(zeropp_term(paper, size, tokens, there, row.baseline),),
        rounding=_RATIO_ROUNDING,
    )


def _volume(paper: Paper, row: VolumeCell) -> Cell | str:
    if not row.value:
        return "an error relative to zero"
    term = zeropp_term(paper, _SHAPE_KNOWN, paper.setting("seq_len"), 1, row.strategy)
    return Cell(
        source="zeropp-volume",
        name=f"{_SHAPE_KNOWN}B, {row.part.replace('_', ' ')}, {row.strategy}",
        strategy=row.strategy,
        group="zeropp-volume",
        published=row.value,
        use=row.use,
        terms=(replace(term, quantity="inter_node_volume", part=row.part),),
    )


def co2_term(paper: Paper, strategy: str, gpus: int) -> Term:
    """Throughput of TransNormerLLM 7B."""
    setup = RunSetup(
        cluster=paper.setting("cluster"),
        model=paper.setting("model"),
        model_overrides=(("seq_len", str(paper.setting("tokens_per_gpu"))),),
        strategy=parse(paper.strategy(strategy)),
        gpus=gpus,
        precision=paper.setting("precision"),
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
