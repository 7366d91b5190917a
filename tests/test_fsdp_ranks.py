"""FSDP: torch's own fully_shard, on four ranks, asks for the collectives of the schedule."""

from typing import Any

import pytest
from together import together

from co2sim.schedule import Collective, Layout
from co2sim.strategies import FSDP, checked
from co2sim.strategies.step import group_size
from co2sim.workload import Block, Model, Workload

pytest.importorskip("torch")

pytestmark = pytest.mark.dist

OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduce": "bf16"},
    {"reshard_after_forward": False},
    {"reshard_after_forward": 2},
    {"shard": "node"},
    {"sync": "last"},
    {"sync": "last", "reshard_after_forward": False},
]
MICRO_STEPS = [1, 3]


@pytest.fixture(scope="module")
def four_ranks() -> dict[str, list[Any]]:
    """What torch asked for on two nodes of two ranks: one micro-step, then three."""
    found = {}
    for count in MICRO_STEPS:
        calls = {"steps": {"options": OPTIONS, "micro_steps": count}}
        found[str(count)] = together("fsdp_workers", 4, calls, gpus_per_node=2)["steps"]
    return found


@pytest.mark.parametrize("micro_steps", MICRO_STEPS)
@pytest.mark.parametrize("place", range(len(OPTIONS)), ids=[str(one) for one in OPTIONS])
def test_torch_issues_the_collectives_of_the_schedule_in_its_order(
    place: int, micro_steps: int, four_ranks: dict[str, list[Any]]
) -> None:
    """Kind, number of ranks, type and elements, one by one, on every rank."""
    width, layers = 16, 3
    sizes = {"embedding": 8 * width, **{f"layer{n}": width * width for n in range(layers)}}
    blocks = [Block(name, (size,), 1.0, 0.0) for name, size in {**sizes, "head": 512}.items()]
    job = Workload(Model("stack", tuple(blocks), tokens=1), accumulation=micro_steps)
    layout = Layout(2, 2)
    body = checked(FSDP(**OPTIONS[place], clip=False)).schedule(job, layout).body
    expected = [
        [str(op.work.kind), group_size(op.work.group, layout), str(op.work.dtype), op.work.elements]
        for op in body
        if isinstance(op.work, Collective)
    ]
    for answers in four_ranks[str(micro_steps)]:
        assert answers[place] == expected
