"""Published times of an optimizer step of GPTs of any shape."""

from typing import Any

from analysis.published.cells import Cell, RunSetup, Term
from analysis.published.papers import Paper
from co2sim.errors import OptionError
from co2sim.published_cells import IterationCell
from co2sim.strategies import parse


def gpt(paper: Paper, *, layers: int, hidden: int, heads: int, seq_len: int) -> dict[str, Any]:
    """The model of a run, as `RunSetup` takes it: a GPT of a shape, with the paper's vocabulary."""
    shape = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "seq_len": seq_len,
        "ffn": 4 * hidden,
        "vocab": paper.setting("vocab"),
        "positions": seq_len,
    }
    overrides = tuple((name, str(value)) for name, value in shape.items())
    return {"model": paper.setting("model"), "model_overrides": overrides}


def iteration_cell(paper: Paper, row: IterationCell) -> Cell:
    """The cell of a time. Raises OptionError for a batch that is not divided evenly."""
    together = row.tp * row.pp
    groups = row.gpus // together
    samples = groups * row.micro_batch
    if row.gpus % together or row.global_batch % samples:
        raise OptionError(
            f"global_batch {row.global_batch} is not a multiple of {groups} groups x micro_batch"
            f" {row.micro_batch}"
        )
    stages = f" pp {row.pp}," if row.pp > 1 else ""
    along = ", sequence parallel" if row.sequence_parallel else ""
    setup = RunSetup(
        cluster=paper.simulation.clusters.get(row.cluster, row.cluster),
        strategy=parse(paper.strategy(row.strategy)),
        gpus=row.gpus,
        precision=paper.setting("precision"),
        micro_batch=row.micro_batch,
        accumulation=row.global_batch // samples,
        tp=row.tp,
        pp=row.pp,
        sequence_parallel=row.sequence_parallel,
        **gpt(paper, layers=row.layers, hidden=row.hidden, heads=row.heads, seq_len=row.seq_len),
        **paper.training | {"recompute": row.recompute},
    )
    return Cell(
        source=paper.key,
        name=(
            f"{row.run}, {row.gpus} GPUs, tp {row.tp},{stages} micro-batch {row.micro_batch}{along}"
        ),
        strategy=row.strategy,
        group="",
        published=row.value,
        use=row.use,
        terms=(Term(setup=setup, quantity="iteration_ms"),),
        rounding=row.rounding,
        labels={name: str(getattr(row, name)) for name in ("gpus", "tp", "pp", "micro_batch")},
    )
