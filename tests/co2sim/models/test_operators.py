"""Operators: what ranks have of each, and what is kept of them, whatever the model."""

from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from co2sim.catalog import load_model, names
from co2sim.common.errors import OptionError
from co2sim.models.operators import (
    Attention,
    Block,
    ExpertExchange,
    Model,
    Operator,
    Product,
    TensorExchange,
    backward_flops,
    kinds,
    shard_model,
)
from co2sim.models.transformer import Transformer, language_model
from co2sim.schedule.mesh import Mesh
from co2sim.training.framework import OPERATORS
from co2sim.training.memory import kept_bytes
from co2sim.training.workload import Workload

MESHES = [Mesh(tp=2), Mesh(tp=8, sequence_parallel=True), Mesh(cp=2), Mesh(tp=2, cp=4), Mesh(ep=4)]


@cache
def model(name: str) -> Model:
    """One of the catalog."""
    return load_model(name).value


def divided(name: str, mesh: Mesh) -> Model | None:
    """What a rank has of a model of the catalog, if the mesh divides it."""
    try:
        return shard_model(model(name), mesh)
    except OptionError:
        return None


def blocks(name: str) -> list[Block]:
    """Those of a model of the catalog that differ."""
    whole = model(name)
    return [whole.blocks[place] for place in sorted(set(kinds(whole)))]


@pytest.mark.parametrize("name", names("models"))
def test_ranks_have_equal_parts_of_an_operator_or_all_of_it(name: str) -> None:
    """Of parameters and of FLOP, on every mesh; a vocabulary is filled up to equal parts."""
    for mesh in MESHES:
        part = divided(name, mesh)
        if part is not None:
            check_parts(model(name), part, mesh)


def check_parts(whole: Model, part: Model, mesh: Mesh) -> None:
    """Each operator of a part is one of equal parts of an operator, or all of it."""
    ranks = {mesh.tp, mesh.cp, mesh.tp * mesh.cp, mesh.ep, 1}

    def is_part(of_rank: float, whole: float, filled: float) -> bool:
        return any(0 <= n * of_rank - whole <= n * filled for n in ranks)

    for place in sorted(set(kinds(whole))):
        copied = [op.with_keys(mesh.tp) for op in whole.blocks[place].operators]
        kept = [op for op in copied if op.divided(mesh.inside)]
        for op, mine in zip(kept, part.blocks[place].operators, strict=True):
            assert type(mine) is type(op)
            wide = op.inner if isinstance(op, Product) else getattr(op, "width", 1)
            assert is_part(mine.elements, op.elements, wide), op
            rows = getattr(op, "rows", 1)
            assert is_part(mine.flops, op.flops, 2.0 * rows * wide), op


@pytest.mark.parametrize("name", names("models"))
def test_ranks_together_do_the_flop_of_attention_and_of_layers(name: str) -> None:
    """All of attention; of products those with latent vectors and routers are on every rank."""
    for mesh in MESHES:
        part = divided(name, mesh)
        if part is not None:
            check_flops(model(name), part, mesh)


def check_flops(model: Model, part: Model, mesh: Mesh) -> None:
    """The layers of all ranks have the FLOP of the whole, and of what each of them repeats."""
    ranks = mesh.tp * mesh.cp
    for one, whole in zip(part.blocks[1:-1], model.blocks[1:-1], strict=True):
        alone = [op for op in whole.of(Product) if not op.along]
        repeated = (mesh.tp - 1) * sum(op.flops for op in alone)
        if mesh.sequence_parallel and mesh.ep > 1:
            repeated = 0.0
        copies = sum(op.with_keys(mesh.tp).flops - op.flops for op in whole.of(Product))
        repeated += copies
        assert ranks * one.flops == pytest.approx(whole.flops + repeated, rel=1e-9)
        assert ranks * sum(op.flops for op in one.of(Attention)) == pytest.approx(
            sum(op.flops for op in whole.of(Attention))
        )


@pytest.mark.parametrize("name", names("models"))
def test_an_undivided_model_exchanges_nothing(name: str) -> None:
    """Exchanges of a whole model are places where a division would put them."""
    for work in Workload(model(name)).works():
        assert work.forward.exchanges is None
        assert work.backward.exchanges is None
    for block in blocks(name):
        assert {op.ranks for op in block.of(TensorExchange)} <= {1}
        assert {op.ranks for op in block.of(ExpertExchange)} <= {1}


@pytest.mark.parametrize("name", names("models"))
def test_model_flop_of_a_backward_pass_are_two_of_a_forward_pass(name: str) -> None:
    """Where all is trained; where products are frozen each of them has one."""
    for block in blocks(name):
        assert backward_flops(block) == 2 * block.flops
    if not any(block.is_layer and block.of(Product) for block in model(name).blocks):
        return
    for block in Workload(model(name), lora=4).model.blocks:
        frozen = sum(
            op.flops for op in block.operators if op.frozen and not isinstance(op, Attention)
        )
        assert backward_flops(block) == pytest.approx(2 * block.flops - frozen)


def kept(job: Workload, place: int) -> float:
    """Bytes of a block of a job."""
    return kept_bytes(job, job.executed[place][1])


def operators_of(name: str) -> list[str]:
    """What can be made again of a model of the catalog."""
    present = {part for block in blocks(name) for op in block.operators for part in op.parts}
    return [part for part in OPERATORS if part in present]


@pytest.mark.parametrize("name", names("models"))
def test_operators_that_are_made_again_save_as_much_together_as_apart(name: str) -> None:
    """In every block, by either attention; an activation function is a part of its MLP."""
    for attention in ("flash", "eager"):
        check_savings(name, attention)


def check_savings(name: str, attention: str) -> None:
    """Of all sets of operators of a model."""
    parts = operators_of(name)
    options = {"micro_batch": 2, "attention": attention, "checkpointing": "reentrant"}
    jobs = {
        some: Workload(model(name), recompute="+".join(some) or "none", **options)  # type: ignore[arg-type]
        for count in range(len(parts) + 1)
        for some in combinations(parts, count)
    }
    for place in set(kinds(model(name))):
        whole = kept(jobs[()], place)
        saved = {some: whole - kept(job, place) for some, job in jobs.items()}
        for some, size in saved.items():
            apart = [one for one in some if not (one == "activation" and "mlp" in some)]
            assert size == pytest.approx(sum(saved[one,] for one in apart))
            assert 0 <= size <= whole


SHAPES = st.fixed_dictionaries(
    {
        "hidden": st.sampled_from([64, 128]),
        "heads": st.sampled_from([8, 16]),
        "kv_heads": st.sampled_from([0, 8]),
        "head_dim": st.sampled_from([0, 24]),
        "ffn": st.sampled_from([192, 320]),
        "gated": st.booleans(),
    }
)
PASSES = {"none": (1, 2), "full": (1, 3)}


@given(
    SHAPES,
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 2]),
    st.integers(1, 3),
    st.sampled_from(["none", "full"]),
)
def test_a_rank_multiplies_matrices_of_the_shapes_of_megatron(
    shape: dict[str, int], tp: int, cp: int, samples: int, recompute: str
) -> None:
    """Columns of queries, keys and values, and of the MLP, and rows of what follows, are divided.

    Each runs once in a forward pass and twice in a backward one, once more where a layer runs again
    as a whole. Attention sees all keys of the sequence. Source: Shoeybi et al. 2019, Megatron-LM,
    arXiv 1909.08053, section 3, figure 3.
    """
    tokens, h, f, heads = 48, shape["hidden"], shape["ffn"], shape["heads"]
    wide = shape["head_dim"] or h // heads
    q, kv = heads * wide // tp, (shape["kv_heads"] or heads) * wide // tp
    up = (2 if shape["gated"] else 1) * f // tp
    rows, own = samples * tokens // cp, samples * heads // tp
    expected = [
        (rows, h, q + 2 * kv, 1),
        (tokens // cp, wide, tokens, own),
        (tokens // cp, tokens, wide, own),
        (rows, q, h, 1),
        (rows, h, up, 1),
        (rows, f // tp, h, 1),
    ]
    body = Transformer(layers=1, **shape)  # type: ignore[arg-type]
    whole = language_model("m", body, vocab=96, tokens=tokens, tied=False)
    job = Workload(
        whole,
        micro_batch=samples,
        attention="eager",
        recompute=recompute,
        checkpointing="reentrant",
        tp=tp,
        cp=cp,
    )
    work = job.share.works()[1]
    for one, often in zip((work.forward, work.backward), PASSES[recompute], strict=True):
        assert one.kernels
        found = [(g.rows, g.inner, g.columns, g.batch) for g in one.kernels.products]
        assert found == expected
        assert {g.count for g in one.kernels.products} == {often}


def test_equal_layers_are_one_kind() -> None:
    """Whatever they are called, and whether or not they share the list of their operators."""
    whole = model("llama3-8b")
    assert len(set(kinds(whole))) == 3
    apart = tuple(
        replace(block, operators=tuple(replace(op) for op in block.operators))
        for block in whole.blocks
    )
    assert kinds(replace(whole, blocks=apart)) == kinds(whole)


def test_blocks_before_the_first_trained_one_have_no_backward_pass() -> None:
    """Whatever they have beside frozen parameters, such as an activation function."""
    frozen = Product(inner=8, columns=8, tensors=(64,), frozen=True)
    trained = Product(inner=8, columns=8, tensors=(64,))
    blocks = [
        Block(str(n), (op, Operator(name="relu", calls=1)))
        for n, op in enumerate((frozen, trained))
    ]
    model = Model("probe", tuple(blocks), 1)
    assert model.first_trained == 1
    assert model.flops_per_sample == 4 * frozen.flops


# --- packed documents -----------------------------------------------------------------------------


def attention(**of: int) -> Attention:
    """One head of 8 columns over 64 tokens."""
    return Attention(rows=64, heads=1, keys=1, wide=8, value=8, length=64, fused=True, **of)


def test_documents_have_scores_within_themselves() -> None:
    """By hand: 4 of 16 tokens have 64 x 16 / 2 causal scores in place of 64 x 64 / 2."""
    packed, whole = attention(document=16), attention()
    per_score = 2 * 2 * 8  # a multiply-add for each column of a key, and of a value
    assert packed.kernel(1, 2.0, 1, 0.0).flops == per_score * 64 * 16 / 2
    assert whole.kernel(1, 2.0, 1, 0.0).flops == per_score * 64 * 64 / 2
    assert packed.kernel(1, 2.0, 1, 0.0).bytes == whole.kernel(1, 2.0, 1, 0.0).bytes
    assert (packed.seen, whole.seen) == (16, 64)


def test_documents_longer_than_a_sequence_are_one() -> None:
    """And a window that is as long as a document hides nothing of it."""
    assert attention(document=100).flops == attention(document=64).flops == attention().flops
    assert attention(document=16, window=32).flops == attention(document=16).flops
    assert attention(document=16, window=4).flops == 4 * (4 * (32 - 4)) * 2 * 16


@given(st.integers(1, 64), st.integers(1, 64))
def test_longer_documents_cost_no_less(less: int, more: int) -> None:
    """Of any two lengths, with a window and without."""
    less, more = sorted((less, more))
    for window in (0, 5):
        shorter, longer = (attention(document=n, window=window) for n in (less, more))
        assert shorter.flops <= longer.flops * (1 + 1e-12)


def test_eager_attention_computes_what_it_masks() -> None:
    """Its products are as large as without documents."""
    whole = replace(attention(), fused=False)
    assert replace(whole, document=16).gemms(1, 2.0) == whole.gemms(1, 2.0)
