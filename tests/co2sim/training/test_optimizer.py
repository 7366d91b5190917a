"""Optimizers: what each keeps, moves and computes of a matrix and of another tensor."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from co2sim import Question, simulate
from co2sim.catalog import load_model, load_optimizer, names
from co2sim.common.errors import CatalogError, OptionError
from co2sim.schedule.schedule import DType
from co2sim.training.optimizer import (
    ADAMW,
    Matrix,
    Optimizer,
    Tensors,
    states_per_parameter,
    trained_tensors,
)

SIZES = st.integers(1, 3000)
KNOWN = {name: load_optimizer(name).value for name in names("optimizers")}
BF16 = DType.BF16
ONE: dict[str, Any] = {
    "cluster": "dgx-h100",
    "model": "gpt2-small",
    "strategy": "ddp",
    "gpus": 8,
    "micro_batch": 1,
    "accumulation": 1,
}
"""A small job."""


def matrix(rows: int, columns: int, **changes: Any) -> Tensors:
    """One matrix and nothing else."""
    return Tensors((Matrix(rows, columns, **changes),))


def test_the_default_is_that_of_the_catalog() -> None:
    """AdamW stands in the code, for those who read no files, and in its file."""
    assert KNOWN["adamw"].moments == ADAMW.moments
    assert states_per_parameter(KNOWN["adamw"], load_model("gpt2-small").value) == 8
    assert KNOWN["adamw"] == Optimizer(name="adamw", title=KNOWN["adamw"].title)


@given(SIZES, SIZES)
def test_states_have_closed_forms(r: int, c: int) -> None:
    """Bytes of a matrix of r x c, and for an element of another tensor."""
    n = r * c
    squares = 2 * 4 * (r * r + c * c)  # both sides are below 10,000
    expected = {
        "adamw": (8 * n, 8),
        "adamw_8bit": (2 * n * (1 + 4 / 256), 2 * (1 + 4 / 256)),
        "adamw_bf16": (4 * n, 4),
        "sgd": (4 * n, 4),
        "lion": (4 * n, 4),
        "adafactor": (4 * (r + c), 4),
        "muon": (4 * n, 8),
        "soap": (8 * n + squares, 8),
        "schedule_free": (8 * n, 8),
    }
    assert expected.keys() == KNOWN.keys()
    for name, (whole, each) in expected.items():
        assert KNOWN[name].states(matrix(r, c)) == pytest.approx(whole, rel=1e-12), name
        assert KNOWN[name].states(Tensors(others=7)) == pytest.approx(7 * each), name


@given(SIZES, SIZES)
def test_soap_computes_its_statistics_projections_and_bases(r: int, c: int) -> None:
    """Two products for statistics, six for projections, and a tenth of new bases in a step."""
    products = KNOWN["soap"].products(Matrix(r, c), BF16)
    sides = 2 * r * c * (r + c)
    bases = (2 + 8 / 3) * (r**3 + c**3) / 10
    assert sum(p.flops for p in products) == pytest.approx(4 * sides + bases, rel=1e-12)
    assert {p.narrow for p in products} == {"fp32"}


def test_a_side_that_is_too_long_has_no_preconditioner() -> None:
    """SOAP leaves sides above 10,000 as they are."""
    soap, n = KNOWN["soap"], 20_000 * 100
    assert soap.states(matrix(20_000, 100)) == 8 * n + 2 * 4 * 100**2
    assert {p.rows for p in soap.products(Matrix(20_000, 100), BF16)} == {100}


@given(SIZES, SIZES, st.integers(1, 9), st.integers(0, 10**6), st.sampled_from(sorted(KNOWN)))
def test_work_and_states_add_up(r: int, c: int, count: int, others: int, name: str) -> None:
    """`count` matrices are as many single ones and a transposed one is equal; so is the traffic."""
    made = KNOWN[name]
    together = Tensors((Matrix(r, c, count),), others)
    apart = Tensors((*[Matrix(c, r)] * (count - 1), Matrix(r, c)), others)
    assert together.elements == apart.elements
    for ask in (made.states, lambda tensors: made.moved(tensors, 2.0)):
        assert ask(together) == pytest.approx(ask(apart), rel=1e-12)
    flops = [
        sum(p.flops for m in tensors.matrices for p in made.products(m, BF16))
        for tensors in (together, apart)
    ]
    assert flops[0] == pytest.approx(flops[1], rel=1e-12)


def test_traffic_is_every_state_twice_beside_gradient_and_parameter() -> None:
    """28 bytes for AdamW in bf16, 24 in fp32; all in bf16: 2 + 4 + 4 for moments and parameter."""
    one = Tensors(others=1)
    assert [KNOWN["adamw"].moved(one, width) for width in (2.0, 4.0)] == [28, 24]
    assert KNOWN["adamw_bf16"].moved(one, 2.0) == 2 + 2 + 2 + 8


@pytest.mark.parametrize("name", names("models"))
def test_all_that_is_trained_is_a_matrix_or_another_tensor(name: str) -> None:
    """No parameter is lost or counted twice, and of language models 99 % are in matrices."""
    model = load_model(name).value
    dense, experts = trained_tensors(model)
    assert dense.elements + experts.elements == model.trained_parameters
    if model.unit == "token":
        assert dense.others + experts.others < 0.01 * model.trained_parameters


def test_muon_leaves_embedding_head_and_norms_to_adamw() -> None:
    """Llama 3 8B: two tables of 128,256 x 4,096, 65 norms, and the rest in 4 bytes."""
    model = load_model("llama3-8b").value
    rest = 2 * 128_256 * 4096 + 65 * 4096
    bytes_ = 4 * (model.parameters - rest) + 8 * rest
    assert states_per_parameter(KNOWN["muon"], model) == bytes_ / model.parameters


def test_shapes_are_needed_only_where_matrices_matter() -> None:
    """ResNet-50 says nothing of its matrices: AdamW trains it, Muon is refused."""
    simulate(**ONE | {"model": "resnet-50"}, optimizer="lion")
    with pytest.raises(OptionError, match="muon"):
        simulate(**ONE | {"model": "resnet-50"}, optimizer="muon")


OWN = """
name = "mine"
moments = ["bf16"]
newton_schulz = 3
[others]
moments = ["int8"]
scale_block = 64
"""


def test_a_file_of_ones_own_is_an_optimizer(tmp_path: Path) -> None:
    """By its path, with what updates other tensors in a table; a case holds what stands there."""
    file = tmp_path / "mine.toml"
    file.write_text(OWN)
    made = load_optimizer(str(file)).value
    assert made.states(Tensors((Matrix(3, 5),), 64)) == 2 * 15 + 64 + 4
    case = Question(**ONE, optimizer=str(file))
    kept = case.inlined()
    file.unlink()
    assert kept.load_optimizer().value == made
    assert simulate(**ONE, optimizer=made).optimizer == "mine"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('others = "./adamw.toml"', "others"),
        ("newton_schulz = 100", "newton_schulz"),
        ("squares = 2", "largest"),
        ('moments = ["fp64"]', "moments"),
        ("momentum = 1", "momentum"),
        (f"moments = {['fp32'] * 17}", "17"),
    ],
)
def test_what_no_optimizer_can_be_is_refused(tmp_path: Path, text: str, part: str) -> None:
    """In one line that names what is wrong."""
    file = tmp_path / "mine.toml"
    file.write_text(f'name = "mine"\n{text}\n')
    with pytest.raises(CatalogError, match=part) as refused:
        load_optimizer(str(file))
    assert "\n" not in str(refused.value)


def test_a_number_of_it_can_be_overridden() -> None:
    """`--set optimizer.newton_schulz=6`: a fifth more work; the result names it."""
    five, six = (
        simulate(**ONE, optimizer="muon", overrides=changes)
        for changes in ({}, {"optimizer.newton_schulz": "6"})
    )
    assert six.optimizer != five.optimizer
    assert six.breakdown_s["orthogonalize"] == pytest.approx(
        1.2 * five.breakdown_s["orthogonalize"], rel=1e-3
    )
