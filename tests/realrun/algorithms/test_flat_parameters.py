"""Parameters as flat vectors: nothing is lost, moved, or rounded twice."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from co2sim.common.errors import OptionError

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from realrun.algorithms.flat_parameters import DTYPES, Flat, Holders, holders_of, lay_out
from realrun.algorithms.process_groups import WorkerGroups, Workers

SHAPES = st.lists(st.integers(0, 5), max_size=4)


@st.composite
def parameters(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """Named parameters of several types, some in another order of memory than of dimensions."""
    found = []
    for index in range(draw(st.integers(1, 6))):
        shape = draw(SHAPES)
        made = torch.randn(shape, generator=torch.Generator().manual_seed(index))
        order = draw(st.permutations(range(len(shape))))
        dtype = draw(st.sampled_from(DTYPES))
        found.append((f"p{index}", made.to(dtype).permute(order)))
    return found


@given(parameters())
def test_write_undoes_read(named: list[tuple[str, Any]]) -> None:
    """fp32 holds every type; each parameter gets its own elements back, in its own order."""
    flat = Flat.of(named)
    before = [value.clone() for _, value in named]
    vector = flat.empty()
    flat.read(vector)
    for _, one in named:
        one.zero_()
    flat.write(vector)
    assert flat.elements == sum(one.numel() for _, one in named)
    assert all(torch.equal(one, old) for (_, one), old in zip(named, before, strict=True))
    rounded = vector.clone()
    flat.round(rounded)
    assert torch.equal(rounded, vector)


@given(parameters(), st.floats(-0.4, 0.4))
def test_what_did_not_move_has_no_displacement(named: list[tuple[str, Any]], off: float) -> None:
    """Even where the anchor lies between two numbers of the model's type."""
    flat = Flat.of(named)
    anchor = flat.empty()
    flat.read(anchor)
    anchor *= 1 + off * 2**-9  # less than half of what bf16 resolves
    flat.write(anchor)
    live = flat.empty()
    flat.read(live)
    flat.displace(anchor, live)
    assert not live.any()
    for _, one in named:
        one.zero_()
    flat.read(live)
    flat.displace(anchor, live)
    flat.round(anchor)
    assert torch.equal(live, anchor)


@given(parameters(), st.integers(1, 5))
def test_shares_of_a_worker_are_the_whole_model_once(
    named: list[tuple[str, Any]], count: int
) -> None:
    """What the ranks of a worker read is, section by section, what one rank alone would read."""
    whole = Flat.of(named)
    expected = whole.empty()
    whole.read(expected)
    ranks = tuple(range(count))
    holders = dict.fromkeys((name for name, _ in named), Holders("", ranks, (ranks,)))
    shares = []
    for place in range(count):
        sections = lay_out(named, holders, place)
        part = Flat(sections, sum(one.size for one in sections), torch.device("cpu"))
        vector = part.empty()
        part.read(vector)
        shares.append([one.own(vector) for one in sections])
        assert all(one.size <= one.share or count == 1 for one in sections)
    found = torch.cat([torch.cat(parts) for parts in zip(*shares, strict=True)])
    assert torch.equal(found, expected)


def test_parameters_that_cannot_be_kept_flat_are_refused() -> None:
    """They are named, with what is wrong."""
    for named, words in [
        ([], "the model has no trainable parameters"),
        ([("a", torch.zeros(2, dtype=torch.float64))], "'a' is torch.float64; averages are in"),
        ([("a", torch.zeros(4, 4)[:, :2])], r"'a' is not dense in memory \(strides \(4, 1\)\)"),
        ([("a", torch.zeros(1).expand(3))], "'a' is not dense in memory"),
        ([("a", torch.zeros(1)), ("b", torch.zeros(1, device="meta"))], "parameters are on cpu"),
    ]:
        with pytest.raises(OptionError, match=words):
            Flat.of(named)


def test_small_numbers_survive_in_the_anchor() -> None:
    """A bf16 model whose anchor moves by a hundredth of its resolution has moved after 200."""
    named = [("a", torch.ones(1, dtype=torch.bfloat16))]
    flat = Flat.of(named)
    anchor = flat.empty()
    flat.read(anchor)
    for _ in range(200):
        anchor += 2**-7 / 100
        flat.write(anchor)
    assert math.isclose(float(named[0][1]), 1 + 2 * 2**-7)


def test_parameters_sharded_over_one_rank_are_not_sharded() -> None:
    """FSDP2 on one rank: they stand in a row with plain ones, as the same model without FSDP2."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        plain = [("a", torch.ones(3)), ("b", torch.ones(5)), ("c", torch.ones(2))]
        mixed = [
            (name, distribute_tensor(one, mesh, [Shard(0)]) if name == "b" else one)
            for name, one in plain
        ]
        links = WorkerGroups(Workers(None), 1.0, owns=False)
        flats = [Flat.of(named, holders_of(dict(named), links)) for named in (mixed, plain)]
        assert flats[0].describe() == flats[1].describe()
        assert [one.name for one in flats[0].sections[0].members] == ["a", "b", "c"]
    finally:
        dist.destroy_process_group()
