"""A small GPT whose layers ranks can share."""

from co2sim import strategies
from co2sim.models.architecture import Transformer, language_model
from co2sim.models.workload import Workload
from co2sim.prediction.case import schedule_of
from co2sim.schedule.schedule import Layout, Schedule

BODY = Transformer(layers=2, hidden=64, heads=8, ffn=256, dropout=True)
"""A GPT: all widths of keys and values are those of the layer."""
VOCAB = 1000
TOKENS = 32


def job(tp: int = 1, *, sequence: bool = False, **changes: object) -> Workload:
    """A small GPT in bf16."""
    model = language_model("gpt", BODY, vocab=VOCAB, tokens=TOKENS, tied=True, positions=TOKENS)
    return Workload(model, tp=tp, sequence_parallel=sequence, **changes)  # type: ignore[arg-type]


def planned(strategy: str, work: Workload, layout: Layout) -> Schedule:
    """What every rank does."""
    return schedule_of(strategies.parse(strategy), work, layout)
