"""FSDP: torch's own fully_shard, on four ranks, asks for the collectives of the schedule."""

from typing import Any

import pytest
from ranks import on_ranks

from co2sim.models.workload import Block, Model, Workload
from co2sim.schedule.schedule import Collective, Layout
from co2sim.strategies import FSDP, checked
from co2sim.strategies.step import group_size

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


@pytest.mark.parametrize("micro_steps", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_torch_issues_the_collectives_of_the_schedule_in_its_order(micro_steps: int) -> None:
    """Kind, number of ranks, type and elements, one by one, on every rank: two nodes of two."""
    width, layers = 16, 3
    sizes = {"embedding": 8 * width, **{f"layer{n}": width * width for n in range(layers)}}
    blocks = [Block(name, (size,), 1.0, 0.0) for name, size in {**sizes, "head": 512}.items()]
    job = Workload(Model("stack", tuple(blocks), tokens=1), accumulation=micro_steps)
    layout = Layout(2, 2)
    given = {"module": "fsdp_workers", "options": OPTIONS, "micro_steps": micro_steps}
    answers = on_ranks("steps", 4, gpus_per_node=2, **given)
    for place, options in enumerate(OPTIONS):
        body = checked(FSDP(**options, clip=False)).schedule(job, layout).body
        expected = [
            [
                str(op.work.kind),
                group_size(op.work.group, layout),
                str(op.work.dtype),
                op.work.elements,
            ]
            for op in body
            if isinstance(op.work, Collective)
        ]
        for answer in answers:
            assert answer[place] == expected, options
