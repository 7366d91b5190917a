"""A small GPT whose layers ranks can share."""

from dataclasses import replace

from co2sim import strategies
from co2sim.models.operators import Model
from co2sim.models.transformer import Experts, Transformer, language_model
from co2sim.prediction.job import schedule_of
from co2sim.schedule.schedule import Layout, Schedule
from co2sim.training.workload import Workload

BODY = Transformer(layers=2, hidden=64, heads=8, ffn=256, dropout=True)
"""A GPT: all widths of keys and values are those of the layer."""
VOCAB = 1000
TOKENS = 32


def job(tp: int = 1, *, sequence: bool = False, **changes: object) -> Workload:
    """A small GPT in bf16."""
    model = language_model("gpt", BODY, vocab=VOCAB, tokens=TOKENS, tied=True, positions=TOKENS)
    return Workload(model, tp=tp, sequence_parallel=sequence, **changes)  # type: ignore[arg-type]


def small(body: Transformer, tokens: int, **changes: object) -> Model:
    """A small language model whose body is changed."""
    whole = replace(body, **changes)  # type: ignore[arg-type]
    return language_model("small", whole, vocab=96, tokens=tokens, tied=False)


def routed_job(ep: int = 1, load: float = 1.0, **changes: object) -> Workload:
    """The same with eight experts in its last layer."""
    body = replace(BODY, experts=Experts(count=8, active=2, width=64, dense=1, load=load))
    model = language_model("experts", body, vocab=VOCAB, tokens=TOKENS, tied=False)
    return Workload(model, ep=ep, **changes)  # type: ignore[arg-type]


def planned(strategy: str, work: Workload, layout: Layout) -> Schedule:
    """What every rank does."""
    return schedule_of(strategies.parse(strategy), work, layout)
