"""Tensor parallelism of traced modules by a plan: beside formulas, and PyTorch's own DTensor."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.tensor import Replicate, Shard, init_device_mesh  # noqa: E402
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import co2sim  # noqa: E402
from co2sim.catalog import load_model  # noqa: E402
from co2sim.catalog.model_files import model_from_json, model_to_json  # noqa: E402
from co2sim.common.errors import OptionError  # noqa: E402
from co2sim.models.operators import (  # noqa: E402
    Block,
    CrossEntropy,
    Model,
    Product,
    TensorExchange,
    shard_model,
)
from co2sim.models.transformer import Transformer, language_model  # noqa: E402
from co2sim.schedule.mesh import Mesh  # noqa: E402
from co2sim.schedule.schedule import Kind  # noqa: E402
from co2sim.training.memory import kept_bytes  # noqa: E402
from co2sim.training.workload import Workload  # noqa: E402

HIDDEN, HEADS, KEYS, FFN, LAYERS, WORDS, TOKENS = 64, 8, 4, 192, 3, 510, 32
SIZE = HIDDEN // HEADS
PLAN: dict[str, Any] = {
    "table": "embedding_rowwise",
    "layers.*.attention.w[qkv]": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.mlp.gate": "colwise",
    "layers.*.mlp.up": "colwise",
    "layers.*.mlp.down": "rowwise",
    "head": "colwise",
}
DTENSOR: dict[str, Any] = {
    "table": RowwiseParallel(input_layouts=Replicate()),
    "layers.*.attention.w[qkv]": ColwiseParallel(),
    "layers.*.attention.wo": RowwiseParallel(),
    "layers.*.mlp.gate": ColwiseParallel(),
    "layers.*.mlp.up": ColwiseParallel(),
    "layers.*.mlp.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
"""The same for PyTorch, which gathers the logits: its loss of parts needs another context."""


def linear(inner: int, columns: int) -> nn.Linear:
    """Without biases."""
    return nn.Linear(inner, columns, bias=False)


class Attention(nn.Module):
    """Of fewer keys than queries; a rank has some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = linear(HIDDEN, HIDDEN), linear(HIDDEN, HIDDEN)
        self.wk, self.wv = linear(HIDDEN, KEYS * SIZE), linear(HIDDEN, KEYS * SIZE)

    def forward(self, x: Any) -> Any:
        """Causal."""
        q, k, v = (
            f(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for f in (self.wq, self.wk, self.wv)
        )
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            linear(HIDDEN, FFN),
            linear(HIDDEN, FFN),
            linear(FFN, HIDDEN),
        )

    def forward(self, x: Any) -> Any:
        """Down of silu(gate) times up."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Of a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), MLP()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)

    def forward(self, x: Any) -> Any:
        """The residual stream."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """Without positions: they have no parameters, and no products."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, HIDDEN), linear(HIDDEN, WORDS)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)

    def forward(self, ids: Any) -> Any:
        """Logits."""
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def batch() -> Any:
    """Of two samples."""
    return torch.zeros((2, TOKENS), dtype=torch.int64)


def loss(model: Any, ids: Any) -> Any:
    """Over the vocabulary."""
    return functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def traced(plan: Any = PLAN, build: Any = Llama) -> Model:
    """The module by its trace."""
    return co2sim.from_torch(lambda: build().bfloat16(), batch, loss, "own", plan)


def by_formula() -> Model:
    """The same network as the catalog makes it."""
    body = Transformer(
        layers=LAYERS,
        hidden=HIDDEN,
        heads=HEADS,
        kv_heads=KEYS,
        ffn=FFN,
        gated=True,
        bias=False,
        norm="rmsnorm",
    )
    return language_model("formula", body, vocab=WORDS, tokens=TOKENS, tied=False)


def products(block: Block) -> list[tuple[int, int, int]]:
    """The shapes of all products of a block, of those that are one each alone."""
    return [
        (op.rows, op.inner, width)
        for op in block.of(Product)
        for width in op.widths or (op.columns,)
    ]


def exchanges(block: Block) -> list[tuple[str, int, int]]:
    """Where ranks exchange, how many elements, and how many ranks."""
    return [(op.side, op.rows * op.width, op.ranks) for op in block.of(TensorExchange)]


@pytest.mark.parametrize("tp", [2, 4])
def test_a_rank_of_a_planned_module_is_that_of_its_formula(tp: int) -> None:
    """Parameters, FLOP, products and exchanges of every block."""
    mine, theirs = (shard_model(model, Mesh(tp=tp)) for model in (traced(), by_formula()))
    for one, other in zip(mine.blocks, theirs.blocks, strict=True):
        assert one.parameters == other.parameters
        assert one.flops == other.flops
        assert products(one) == products(other)
        assert exchanges(one) == exchanges(other)
        assert [op.ranks for op in one.of(CrossEntropy)] == [
            op.ranks for op in other.of(CrossEntropy)
        ]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_keeps_what_it_keeps_by_formula(tp: int) -> None:
    """Of a layer: to 2 %, which are scales of norms."""
    mine, theirs = (
        Workload(model, tp=tp, keeps=("activations",), attention="flash").share
        for model in (traced(), by_formula())
    )
    sizes = [kept_bytes(job, job.executed[1][1]) for job in (mine, theirs)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.02)


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Iterator[Any]:
    """As many ranks as asked, of which none but this one is there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield init_device_mesh("cpu", (request.param,))
    dist.destroy_process_group()


@pytest.mark.parametrize("mesh", [2, 4], indirect=True)
def test_a_rank_has_the_parameters_that_pytorch_gives_it(mesh: Any) -> None:
    """`parallelize_module` with the same plan."""
    model = parallelize_module(Llama(), mesh, DTENSOR)
    local = [getattr(x, "to_local", lambda x=x: x)() for x in model.parameters()]
    mine = shard_model(traced(DTENSOR), Mesh(tp=mesh.size()))
    assert mine.parameters == sum(x.numel() for x in local)


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("mesh", [2], indirect=True)
def test_ranks_exchange_as_often_as_those_of_pytorch(mesh: Any) -> None:
    """All-reduces of a step, where modules that read the same share its gradient."""
    shared = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    model = parallelize_module(
        Llama(), mesh, {**DTENSOR, "layers.*.attention": shared, "layers.*.mlp": shared}
    )
    with CommDebugMode() as counted:
        loss(model, batch()).backward()
    done = Counter({str(op).rpartition(".")[2]: n for op, n in counted.get_comm_counts().items()})
    works = Workload(traced(DTENSOR), tp=2).share.works()
    passes = (one.exchanges for work in works for one in (work.forward, work.backward))
    mine = Counter(
        collective.kind
        for made in passes
        if made
        for collective in (*made.before, *made.beside, *made.behind)
    )
    assert done == {
        "all_reduce": mine[Kind.ALL_REDUCE],
        "all_gather_into_tensor": mine[Kind.ALL_GATHER],
    }


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def of_transformers(values: dict[str, Any]) -> Model:
    """A class of transformers by its trace, on a sequence of all positions."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**values, use_cache=False)
    ids = torch.zeros((1, 64), dtype=torch.int64)
    return co2sim.from_torch(
        lambda: transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16),
        lambda: {"input_ids": ids, "labels": ids},
    )


def test_a_class_of_transformers_has_its_own_plan(tmp_path: Path) -> None:
    """Its rank is that of the formula, but that it gathers the logits."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    formula = load_model(str(tmp_path), {"seq_len": "64"}).value
    mine, theirs = (
        shard_model(model, Mesh(tp=2)).blocks for model in (of_transformers(LLAMA), formula)
    )
    logits = mine[-1].of(TensorExchange)[-1]
    assert (logits.gathers, logits.width) == (True, LLAMA["vocab_size"])
    for one, other in zip(mine, theirs, strict=True):
        assert (one.parameters, one.flops) == (other.parameters, other.flops)
        assert products(one) == products(other)
        assert [x for x in exchanges(one) if x[1] != logits.rows * logits.width] == exchanges(other)


@pytest.mark.parametrize("tp", [4, 8])
def test_heads_that_are_repeated_are_divided_as_they_were_made(tp: int) -> None:
    """Two heads of keys of transformers' attention, which repeats them."""
    with pytest.raises(OptionError, match=r"2 heads of keys|4 heads"):
        shard_model(of_transformers(LLAMA), Mesh(tp=tp))


def test_a_class_with_a_plan_of_other_words_is_refused_where_it_is_divided() -> None:
    """Experts, in one line that has the word; without tensor parallelism it is a model."""
    model = of_transformers({**LLAMA, "model_type": "mixtral", "num_local_experts": 4})
    with pytest.raises(OptionError, match="packed_colwise"):
        shard_model(model, Mesh(tp=2))


class Wide(Layer):
    """With a norm over what ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.RMSNorm(FFN)
        down = self.mlp.down.forward
        self.mlp.down.forward = lambda x: down(self.inner(x))  # type: ignore[method-assign]


class Shared(Llama):
    """Whose head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.table.weight


def without(*paths: str, **more: Any) -> dict[str, Any]:
    """The plan without some of its paths, and with others."""
    return {path: style for path, style in PLAN.items() if path not in paths} | more


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (3, "tp_plan is 3"),
        ({**PLAN, "layers.*.mlp.w1": "colwise"}, "layers.*.mlp.w1"),
        ({**PLAN, "head": "sideways"}, "sideways"),
        ({**PLAN, "norm": SequenceParallel()}, "SequenceParallel"),
        ({**PLAN, "head": ColwiseParallel(input_layouts=Shard(1))}, "Shard(dim=1)"),
        ({**PLAN, "layers.*.mlp": "colwise"}, "layers.0.mlp cannot be colwise"),
        ({**PLAN, "table": "colwise"}, "table cannot be colwise"),
        (without("layers.*.mlp.down"), "layers.0.mlp.down"),
        ({**PLAN, "layers.*.mlp.down": "colwise"}, "layers.0.mlp.down"),
        (without("layers.*.mlp.gate", "layers.*.mlp.up"), "layers.0.mlp.down is rowwise"),
    ],
    ids=str,
)
def test_a_plan_that_does_not_divide_the_module_is_refused(plan: Any, words: str) -> None:
    """In one line that names what."""
    with pytest.raises(OptionError, match=re.escape(words)) as found:
        traced(plan)
    assert "\n" not in str(found.value)


def test_a_norm_over_what_is_divided_is_refused() -> None:
    """Its weight is as wide."""

    def build() -> nn.Module:
        model = Llama()
        model.layers = nn.ModuleList(Wide() for _ in range(LAYERS))
        return model

    with pytest.raises(OptionError, match=r"layers\.0\.inner"):
        traced(PLAN, build)


def test_a_shared_weight_is_divided_once() -> None:
    """By both of its modules, or by none."""
    halves = shard_model(traced(PLAN, Shared), Mesh(tp=2))
    assert halves.blocks[0].parameters == WORDS * HIDDEN // 2
    with pytest.raises(OptionError, match="share a weight"):
        traced(without("table"), Shared)


def test_columns_that_ranks_do_not_divide_are_refused() -> None:
    """By their module, for layers without attention."""
    plan = {path: PLAN[path] for path in PLAN if ".mlp." in path}
    with pytest.raises(OptionError, match=f"{FFN} columns of gate"):
        shard_model(traced(plan), Mesh(tp=5))


@pytest.mark.parametrize(
    "mesh",
    [Mesh(cp=2), Mesh(ep=2), Mesh(tp=2, sequence_parallel=True)],
    ids=lambda mesh: mesh.mesh_words(),
)
def test_no_other_division_applies_to_a_planned_module(mesh: Mesh) -> None:
    """A plan says none."""
    with pytest.raises(OptionError, match="traced module"):
        shard_model(traced(), mesh)


def test_the_file_of_a_planned_module_divides_as_it() -> None:
    """Operators say how."""
    model = traced()
    read = model_from_json(json.loads(json.dumps(model_to_json(model))))
    assert shard_model(read, Mesh(tp=2)) == shard_model(model, Mesh(tp=2))


def test_without_a_plan_operators_are_those_of_a_plan_on_one_rank() -> None:
    """But for elementwise kernels, which a plan has as two operators: sums are equal."""
    for one, other in zip(traced({}).blocks, traced().blocks, strict=True):
        for name in ("work", "calls", "kept"):
            sums = [sum(getattr(op, name) * op.rows for op in b.operators) for b in (one, other)]
            assert sums[0] == sums[1]
        moved = [[op.exact for op in b.operators if op.name == "elementwise"] for b in (one, other)]
        assert [sum(x) for x in zip(*moved[0], strict=True)] == [
            sum(x) for x in zip(*moved[1], strict=True)
        ]
