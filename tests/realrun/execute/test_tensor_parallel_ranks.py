"""Ranks that share layers or experts: the same schedules over Gloo."""

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

from ranks import ranked
from small_gpt import job, planned, routed_job
from tiny import VARIANTS
from workers import executed

from co2sim.schedule.exchanges import TENSOR
from co2sim.schedule.schedule import Collective, Layout, Op
from co2sim.training.workload import Workload
from realrun.execute.world import World

pytestmark = pytest.mark.dist


def met(
    world: World, strategy: str, work: Workload, key: Callable[[Op, Collective], object]
) -> dict[object, set[int]]:
    """Run a strategy, which breaks no rule: whom this rank met, by keys of ops."""
    schedule = planned(strategy, work, world.layout)
    executed(world, schedule)
    ranks: dict[object, set[int]] = {}
    for op in schedule.body:
        if isinstance(op.work, Collective):
            at = world.communicator(op.stream, op.work.group)
            ranks.setdefault(key(op, op.work), set()).update(at.members if at else ())
    return ranks


def groups(rank: int) -> dict[str, set[int]]:
    """The ranks beside this one, those with its place in their pair, and all."""
    first = rank // 2 * 2
    return {"pair": {first, first + 1}, "alike": {rank % 2, rank % 2 + 2}, "world": {0, 1, 2, 3}}


@pytest.mark.parametrize("per_node", [2, pytest.param(4, marks=pytest.mark.nightly)])
@ranked(4)
def test_every_strategy_runs_on_ranks_that_share_layers_and_breaks_no_rule(
    world: World, per_node: int
) -> None:
    """Pairs share layers; all else meets those with one place in their pairs, in checking mode."""
    world.place(Layout(4 // per_node, per_node))
    expected = groups(world.rank)
    for index, text in enumerate(VARIANTS[:: 4 if per_node == 4 else 3]):
        work = job(2, sequence=bool(index % 2))
        ranks = met(world, text, work, lambda op, _: op.stream == TENSOR)
        assert ranks[True] == expected["pair"], text
        assert ranks.get(False, set()) <= expected["alike"], text


IN_EVERY_STEP = ["ddp", "zero1", "zero2", "fsdp"]
REPLICATED = {"experts": "pair", "replicas": "alike", "world": "world"}


@pytest.mark.parametrize(
    ("variants", "options", "whom"),
    [
        (IN_EVERY_STEP, {"ep": 2}, REPLICATED),
        (IN_EVERY_STEP, {"ep": 2, "load": 1.5}, REPLICATED),
        (
            IN_EVERY_STEP,
            {"ep": 4, "load": 1.3, "experts_all_to_all": "hierarchical"},
            {"experts": "world", "world": "world"},
        ),
        (IN_EVERY_STEP, {"cp": 2}, {"context": "pair", "world": "world"}),
        # states divided inside nodes: gradients of experts meet the peers alone
        (
            ["zero1(shard=node)", "zero2(shard=node)"],
            {"ep": 2},
            {"node": "pair", "peers": "alike", "experts": "pair"},
        ),
        (["zero3"], {"ep": 2}, REPLICATED),
        (["zeropp"], {"ep": 2}, REPLICATED | {"node": "pair", "peers": "alike"}),
        (
            ["co2.published(tau=2,worker=node)"],
            {"ep": 2},
            {"node": "pair", "peers": "alike", "experts": "pair"},
        ),
        # pairs share each expert, and both of one place divide them
        (
            IN_EVERY_STEP,
            {"ep": 2, "tp": 2, "etp": 2, "sequence_parallel": True},
            {"tensor": "pair", "experts": "alike", "world": "alike"},
        ),
    ],
)
@ranked(4, gpus_per_node=2)
def test_ranks_that_divide_experts_or_sequences_break_no_rule(
    world: World, variants: list[str], options: dict[str, object], whom: dict[str, str]
) -> None:
    """Pairs exchange; gradients of experts meet the rank with the same ones, others all ranks."""
    expected = {name: groups(world.rank)[which] for name, which in whom.items()}
    for text in variants:
        work = routed_job(**options)
        assert met(world, text, work, lambda _, work: work.group.name) == expected, text
