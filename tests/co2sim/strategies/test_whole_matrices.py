"""Optimizers of whole matrices on ranks that divide them: exchanges, work, and refusals."""

from dataclasses import replace
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from moments import most

from co2sim import strategies
from co2sim.catalog import load_optimizer
from co2sim.common.errors import OptionError
from co2sim.models.operators import Block, CrossEntropy, Model, Operator, Product, Table
from co2sim.schedule.schedule import Compute, DType, Kind, Layout, Schedule
from co2sim.simulation.run import execute
from co2sim.training.workload import Workload

MUON, SOAP, ADAFACTOR = (load_optimizer(name).value for name in ("muon", "soap", "adafactor"))

SIZES = [(8, 8), (8, 24), (24, 8)]
"""Of the matrices of a layer."""

EACH = sum(rows * columns for rows, columns in SIZES)


def product(inner: int, columns: int, groups: int = 0) -> Product:
    """With weights, of 16 tokens; with `groups` those of experts, which two ranks divide."""
    size = inner * columns
    more = {"groups": groups, "tensors": (groups * size,), "apart": 2} if groups else {}
    return Product(**{"rows": 16, "inner": inner, "columns": columns, "tensors": (size,)} | more)


def job(layers: int = 5, **changes: Any) -> Workload:
    """Layers of three matrices between an embedding and a head of 40 words, with a norm each."""
    products = tuple(product(*size) for size in SIZES)
    layer = Block("layer", (*products, Operator(tensors=(8,), kept=500.0)), 128.0)
    head = Block("head", (product(8, 40), CrossEntropy(rows=16, columns=40)), 128.0)
    model = Model(
        "small",
        (
            Block("embedding", (Table(entries=40, width=8),)),
            *(replace(layer, name=f"layer{n}") for n in range(layers)),
            head,
        ),
        tokens=16,
    )
    return Workload(model, **{"optimizer": MUON} | changes)


def made(strategy: str, layout: tuple[int, int] = (2, 2), **changes: Any) -> Schedule:
    """The schedule of a strategy for a job."""
    return strategies.parse(strategy).schedule(job(**changes), Layout(*layout))


def work_of(schedule: Schedule) -> float:
    """FLOP of the products of an optimizer on a rank."""
    works = [op.work for op in schedule.body if op.name.startswith("matrices")]
    return sum(work.flops for work in works if isinstance(work, Compute))


def exchanged(schedule: Schedule) -> list[tuple[Kind, int, DType]]:
    """What is exchanged to make matrices whole, in turn."""
    found = tiny.collectives(schedule, buffer="matrices")
    return [(work.kind, work.elements, work.dtype) for work in found]


WHOLE = job().update.products([m for m in job().update.dense.matrices if not m.table]).flops


def test_each_strategy_exchanges_what_its_implementation_does() -> None:
    """Four ranks, and five matrices of each shape: a rank of fsdp takes two of each."""
    every = (Kind.ALL_GATHER, 5 * EACH, DType.BF16)
    two = (Kind.ALL_TO_ALL, 2 * EACH, DType.BF16)
    expected: dict[str, list[Any]] = {
        "ddp": [],
        "zero1": [every],
        "zero2": [every],
        "zero2(owners=true)": [],
        "zero3": [every] * 4,
        "fsdp": [two] * 2,
        "local_sgd(tau=2)": [],
    }
    assert {name: exchanged(made(name)) for name in expected} == expected


def test_ranks_divide_the_work_that_they_do_not_repeat() -> None:
    """All of it with ddp; of five matrices of a shape a rank of four takes two."""
    assert work_of(made("ddp")) == WHOLE
    for name in ("zero3", "fsdp", "zero2(owners=true)"):
        assert work_of(made(name)) == pytest.approx(2 / 5 * WHOLE)
    assert work_of(made("fsdp(shard=node)")) == pytest.approx(3 / 5 * WHOLE)


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 8))
def test_a_flat_share_works_on_all_matrices_that_it_has_a_part_of(
    layers: int, nodes: int, gpus: int
) -> None:
    """As counted one by one: of zero1 the rank with most work decides."""
    ranks = nodes * gpus
    ends, done = [0], [0.0]
    one = job(layers)
    for matrix in one.update.dense.matrices:
        if not matrix.table:
            ends.append(ends[-1] + matrix.elements)
            done.append(one.update.products([matrix]).flops)
    most = 0.0
    for rank in range(ranks):
        begin, end = (ends[-1] * place / ranks for place in (rank, rank + 1))
        touched = [
            flops
            for flops, first, last in zip(done[1:], ends, ends[1:], strict=False)
            if round(begin) < last and first < round(end)
        ]
        most = max(most, sum(touched))
    assert work_of(made("zero1", (nodes, gpus), layers=layers)) == pytest.approx(most)


@pytest.mark.parametrize(
    "strategy",
    ["ddp", "zero1", "zero2(shard=node)", "zero3", "fsdp", "co2(tau=2,delay=1,worker=node)"],
)
def test_the_next_passes_wait_for_what_the_matrices_were_made(strategy: str) -> None:
    """The trace keeps the rules, and no pass begins before the updates are back."""
    schedule = made(strategy)
    trace = execute(schedule, tiny.cluster(2, 2), precision="bf16", rounds=3)
    assert trace.violations(schedule) == []
    if strategy in {"ddp", "zero1", "zero3", "fsdp"}:
        spans = tiny.by_op(trace)
        last = max(
            s.end
            for (turn, name), s in spans.items()
            if (turn == 0 and "updates" in name) or (turn == 0 and "matrices" in name)
        )
        firsts = [s.start for (turn, name), s in spans.items() if turn == 1 and "forward" in name]
        assert min(firsts) >= last


def test_experts_are_exchanged_among_those_who_have_the_same() -> None:
    """Of two ranks with the same experts, each with half of the experts."""
    layer = Block("layer", (product(8, 8), product(8, 8, groups=2)), 128.0)
    embedding = Block("embedding", (Table(entries=40, width=8),))
    blocks = (embedding, layer, replace(layer, name="last"))
    whole = Workload(Model("moe", blocks, tokens=16), optimizer=MUON, ep=2, divided_already=True)
    schedule = strategies.parse("zero1").schedule(whole, Layout(2, 2))
    found = tiny.collectives(schedule, Kind.ALL_GATHER)
    sizes = {work.buffer: (work.elements, str(work.group)) for work in found}
    assert sizes["matrices"] == (2 * 64, "world")
    assert sizes["experts"] == (2 * 128, "replicas(2)")


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        ("zeropp", MUON),
        ("fsdp(version=1)", MUON),
        ("zeropp", SOAP),
        ("zero3", SOAP),
        ("fsdp", SOAP),
        ("zero1", ADAFACTOR),
        ("zero3", ADAFACTOR),
        ("fsdp(version=1)", ADAFACTOR),
    ],
)
def test_what_no_implementation_does_is_refused(strategy: str, optimizer: Any) -> None:
    """In one line, with the optimizer and what has it."""
    with pytest.raises(OptionError, match=f"optimizer={optimizer.name}.*use ddp") as refused:
        made(strategy, optimizer=optimizer)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [("ddp", SOAP), ("zero1", SOAP), ("zero2", SOAP), ("ddp", ADAFACTOR), ("fsdp", ADAFACTOR)],
)
def test_what_the_others_need_is_nothing_more(strategy: str, optimizer: Any) -> None:
    """Owners of whole matrices exchange what they do without; factors need rows alone."""
    usual = made(strategy, optimizer=load_optimizer("adamw").value)
    assert tiny.moved(made(strategy, optimizer=optimizer)) == tiny.moved(usual)


def test_shares_hold_their_part_of_the_states() -> None:
    """Four bytes for an element of a matrix, eight for others, and four of a master copy."""
    whole = job()
    matrices, rest = 5 * EACH, 5 * 8 + 2 * 320
    for strategy, ranks in (("ddp", 1), ("zero1", 4), ("zero3", 4)):
        memory = most(whole, strategy, Layout(2, 2))
        held = 4 * matrices + 8 * rest + 4 * (matrices + rest)
        assert memory["optimizer"] == pytest.approx(held / ranks)
