"""Published cells of ZeRO++ as configurations to simulate: its models, clusters and ratios."""

from dataclasses import replace

from analysis.published.cells import Cell, RunSetup, Term
from analysis.published.papers import Paper
from co2sim.errors import CatalogError, OptionError
from co2sim.published_cells import SpeedupCell, TflopsCell, ThroughputRatioCell, Use, VolumeCell
from co2sim.strategies import parse

SIZES = (18, 49, 91, 138)
"""Of the models of ZeRO++, in billions of parameters."""

_LINK_GBITS = 100

_SHAPE_KNOWN = 18
"""The one model of ZeRO++ whose shape is published."""

_TOKENS = (1024, 2048)
"""Tokens per GPU of the figure that states a ratio over all its bars."""

_RATIO_TOKENS = 2048
"""Tokens per GPU of the figure that states ratios in words."""

_RATIO_ROUNDING = 0.1
"""What "similar throughput" leaves open."""


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
        **paper.training,
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


def tflops_cell(paper: Paper, row: TflopsCell) -> Cell:
    """A bar of ZeRO++'s figures, by the names that it has in `papers/`."""
    size, links = _size(row.model), _links(row.cluster)
    return zeropp_cell(paper, size, row.tokens_per_gpu, links, row.strategy, row.value, row.use)


def speedup_cell(paper: Paper, row: SpeedupCell) -> Cell | str:
    """A speed-up over the models, or why it is not simulated.

    Where no micro-batch is stated it is one over all bars of a figure. These were fitted on, and so
    the cell counts as fitted, too.
    """
    if row.cluster is None:
        return "network and micro-batch not stated"
    links = _links(row.cluster)
    stated = row.tokens_per_gpu is not None
    micro_batches = (row.tokens_per_gpu,) if row.tokens_per_gpu is not None else _TOKENS
    runs = [(size, tokens) for tokens in micro_batches for size in SIZES]
    pick = "max" if row.quantity == "max_speedup" else "min"
    over = " and ".join(map(str, micro_batches))
    return Cell(
        source="zeropp",
        name=f"{pick} speed-up over sizes, {over} tokens, {links} x 100 Gbit/s",
        strategy="zeropp / zero3",
        group="v100-zeropp",
        published=row.value,
        use=row.use if stated else "fit",
        terms=tuple(zeropp_term(paper, *run, links, row.strategy) for run in runs),
        over=tuple(zeropp_term(paper, *run, links, row.baseline) for run in runs),
        pick="max" if pick == "max" else "min",
        rounding=row.rounding,
    )


def throughput_ratio_cell(paper: Paper, row: ThroughputRatioCell) -> Cell:
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


def volume_cell(paper: Paper, row: VolumeCell) -> Cell:
    """What a node sends in a step, of the whole model or of one kind of collective."""
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
