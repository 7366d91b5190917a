"""From a trace to a model: blocks, operators, sizes of a sample. Traces are written by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from co2sim.common.errors import OptionError
from co2sim.models.operators import Attention, Block, CrossEntropy, Model, Operator, Product
from co2sim.tracing.trace import (
    Access,
    AttentionShape,
    ConvolutionShape,
    Kernel,
    Module,
    Parameter,
    Phase,
    ProductShape,
    Shape,
    Storage,
    Trace,
)
from co2sim.tracing.traced import model_of

SAMPLES, TOKENS, WIDTH, WORDS = 2, 8, 4, 16
BYTES = 2
ROWS = SAMPLES * TOKENS
SIZE = ROWS * WIDTH * BYTES
"""Bytes of the activations of a batch."""


class Network:
    """A trace that is written kernel by kernel; its storages are numbered as they are made."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self.storages: list[Storage] = []
        self.parameters: list[Parameter] = []
        self.kept: dict[int, str] = {}

    def weight(self, path: str, *shape: int, trainable: bool = True) -> int:
        """A parameter; returns its storage."""
        found = Parameter(path, shape, "bfloat16", BYTES, trainable, len(self.storages))
        self.parameters.append(found)
        self.storages.append(Storage(found.numel * BYTES, "parameter", 0, 0))
        return found.storage

    def run(
        self,
        name: str,
        module: str,
        reads: list[int],
        size: int = SIZE,
        shape: Shape | None = None,
        phase: Phase = "forward",
    ) -> int:
        """A kernel that writes one storage; returns that."""
        made = len(self.storages)
        self.storages.append(Storage(size, "activation", len(self.kernels), 0))
        flop = shape.flop if isinstance(shape, ProductShape) else 0
        accesses = tuple(Access(one, self.storages[one].size) for one in reads)
        written = (Access(made, size),)
        self.kernels.append(
            Kernel(name, module, phase, flop, accesses, written, "bfloat16", BYTES, shape)
        )
        return made

    def linear(self, module: str, x: int, columns: int = WIDTH, weight: int | None = None) -> int:
        """A product with a weight; its input is kept."""
        inner = self.storages[x].size // BYTES // ROWS
        if weight is None:
            weight = self.weight(f"{module}.weight", columns, inner)
        self.kept.setdefault(x, module)
        shape = ProductShape(ROWS, inner, columns, 1, "right")
        return self.run("mm", module, [x, weight], ROWS * columns * BYTES, shape)

    def trace(self, *paths: str) -> Trace:
        """A step of it; modules with the same last name but for numbers are alike."""
        every = {
            path[: at or None]
            for path in (*paths, *(kernel.module for kernel in self.kernels))
            for at in (0, *(i for i, letter in enumerate(path) if letter == "."))
        }
        kinds = [
            path.rpartition(".")[2] if not path[-1:].isdecimal() else "Layer" for path in every
        ]
        modules = [Module("", "Net", 1, 0, 0, 0, -1)]
        modules += [
            Module(path, kind, 1, 0, 0, 0, sorted(set(kinds)).index(kind))
            for path, kind in sorted(zip(every, kinds, strict=True))
            if path
        ]
        storages = [replace(s, kept_by=self.kept.get(i)) for i, s in enumerate(self.storages)]
        return Trace(
            tuple(self.kernels),
            tuple(storages),
            tuple(self.parameters),
            tuple(modules),
            SAMPLES,
            ROWS,
            (),
            0.0,
        )


def language(layers: int = 3, *, tied: bool = False) -> Network:
    """Embedding, layers of a product and an addition, and a head with a cross entropy."""
    net = Network()
    table = net.weight("table.weight", WORDS, WIDTH)
    x = net.run("embedding", "table", [table])
    for index in range(layers):
        made = net.linear(f"layers.{index}.up", x)
        x = net.run("add", f"layers.{index}", [x, made])
    logits = net.linear("head", x, WORDS, table if tied else None)
    single = ROWS * WORDS * 4
    wide = net.run("_to_copy", "", [logits], single)
    made = net.run("_log_softmax", "", [wide], single)
    net.kept[made] = ""
    net.kernels[-1] = replace(net.kernels[-1], dtype="float32", width=4)
    target = len(net.storages)
    net.storages.append(Storage(ROWS * 8, "input", 0, 0))
    net.run("nll_loss_forward", "", [made, target], 4)
    return net


def model(net: Network) -> Model:
    """The model of a network."""
    return model_of(net.trace(), "net")


def only(block: Block, kind: type[Operator]) -> Operator:
    """The single operator of a kind."""
    (found,) = (op for op in block.operators if type(op) is kind)
    return found


def test_entries_of_a_list_are_blocks_between_embedding_and_head() -> None:
    """What runs before the first is the embedding, what runs behind the last the head."""
    names = [block.name for block in model(language()).blocks]
    assert names == ["embedding", "layers.0", "layers.1", "layers.2", "head"]


def test_equal_blocks_share_their_operators() -> None:
    """The same tuple, by which blocks are compared."""
    blocks = model(language()).blocks[1:-1]
    assert len({id(block.operators) for block in blocks}) == 1


@given(st.integers(1, 6), st.booleans())
def test_every_parameter_belongs_to_one_block(layers: int, tied: bool) -> None:  # noqa: FBT001
    """The sum over blocks is that of the trace."""
    net = language(layers, tied=tied)
    assert model(net).parameters == sum(parameter.numel for parameter in net.parameters)


def test_sizes_are_those_of_a_sample() -> None:
    """Rows of products, and elements that a block gets."""
    block = model(language()).blocks[1]
    assert only(block, Product).rows == TOKENS
    assert block.boundary == TOKENS * WIDTH


def test_model_flop_are_three_times_those_of_the_forward_pass() -> None:
    """Of products with weights."""
    net = language()
    flop = sum(kernel.flop for kernel in net.kernels)
    assert model(net).flops_per_sample == 3 * flop / SAMPLES


def test_kept_elements_are_those_of_the_trace_but_for_the_loss() -> None:
    """What the cross entropy keeps is counted by its operator."""
    net = language()
    loss = ROWS * WORDS * 4
    kept = net.trace().kept - loss
    blocks = model(net).blocks
    elements = sum(op.rows * op.kept for block in blocks for op in block.operators)
    assert elements == kept / SAMPLES / BYTES


def test_the_loss_over_a_vocabulary_is_one_operator() -> None:
    """With its rows and columns; its kernels move nothing besides."""
    head = model(language()).blocks[-1]
    loss = only(head, CrossEntropy)
    assert isinstance(loss, CrossEntropy)
    assert (loss.rows, loss.columns) == (TOKENS, WORDS)
    assert not any(any(op.exact) for op in head.operators)


def test_a_shared_weight_belongs_to_the_block_that_uses_it_first() -> None:
    """The product elsewhere has none of its own, and says so."""
    blocks = model(language(tied=True)).blocks
    assert blocks[0].parameters == blocks[-1].tied == WORDS * WIDTH
    assert not blocks[-1].parameters


def test_frozen_parameters_are_not_trained() -> None:
    """Those of products, and those of other kernels."""
    net = language()
    net.parameters = [replace(p, trainable="layers" not in p.path) for p in net.parameters]
    found = model(net)
    assert found.trained_parameters == 2 * WORDS * WIDTH


def test_other_kernels_move_what_they_read_and_write() -> None:
    """An addition reads two and writes one; weights do not grow with the batch."""
    block = model(language()).blocks[1]
    assert only(block, Operator).exact == (3 * TOKENS * WIDTH, 0.0)


def chain(*names: str) -> Block:
    """A layer of elementwise kernels between two products, each of which keeps its input."""
    net = Network()
    x = net.run("embedding", "table", [net.weight("table.weight", WORDS, WIDTH)])
    for index in range(2):
        x = net.linear(f"layers.{index}.up", x)
        for name in names:
            net.kept[x] = f"layers.{index}"
            x = net.run(name, f"layers.{index}", [x])
        down = net.linear(f"layers.{index}.down", x)
        net.run("mm", f"layers.{index}.down", [x], SIZE, ProductShape(4, 4, 4), "backward")
        x = down
    return model(net).blocks[1]


@given(st.integers(1, 5))
def test_a_compiler_makes_one_kernel_of_a_chain(length: int) -> None:
    """It reads the input and writes the output, however long the chain is."""
    operator = only(chain(*["mul"] * length), Operator)
    assert operator.compiled is not None
    assert operator.compiled.exact[0] == 2 * TOKENS * WIDTH
    assert operator.compiled.calls == 1


@given(st.integers(1, 5))
def test_a_compiler_keeps_the_ends_of_a_chain(length: int) -> None:
    """Its input, from which it is computed again, and what the next product multiplies."""
    block = chain(*["mul"] * length)
    before = TOKENS * WIDTH  # the input of the first product
    kept = sum(op.rows * op.compiled.kept for op in block.operators if op.compiled)
    assert kept == before + 2 * TOKENS * WIDTH


def test_a_lookup_is_no_part_of_a_chain() -> None:
    """It is a kernel of its own, which a compiler does not run again."""
    operator = only(chain("mul", "index", "mul"), Operator)
    assert operator.compiled is not None
    assert operator.compiled.calls > 1


def layer(shape: Shape, weight: tuple[int, ...] = ()) -> Operator:
    """The operator of a kernel in a layer."""
    net = language(2)
    reads = [net.weight("layers.0.own.weight", *weight)] if weight else []
    net.run("kernel", "layers.0.own", reads, SIZE, shape)
    return model(net).blocks[1].operators[1]


def test_attention_has_the_heads_of_a_sample() -> None:
    """And its FLOP count the whole square."""
    found = layer(AttentionShape(SAMPLES, 3, 1, TOKENS, TOKENS, 5, 6, causal=True, masked=False))
    assert isinstance(found, Attention)
    assert (found.rows, found.heads, found.keys, found.length) == (TOKENS, 3, 1, TOKENS)
    assert found.flops == 2 * 3 * (5 + 6) * TOKENS**2


def test_attention_to_another_sequence_has_its_own_keys() -> None:
    """FLOP are those of queries times keys."""
    found = layer(AttentionShape(SAMPLES, 1, 1, TOKENS, 3, 5, 5, causal=False, masked=False))
    assert found.flops == 2 * (5 + 5) * TOKENS * 3


def test_windows_of_an_image_are_heads() -> None:
    """Each sees itself alone."""
    found = layer(AttentionShape(4 * SAMPLES, 3, 3, 7, 7, 5, 5, causal=False, masked=False))
    assert found.flops == 4 * 3 * 2 * (5 + 5) * 7**2


def test_products_of_activations_have_no_weights() -> None:
    """There are as many as of a sample."""
    found = layer(ProductShape(3, 4, 5, batch=6 * SAMPLES))
    assert isinstance(found, Product)
    assert (found.count, found.tensors, found.flops) == (6, (), 6 * 2 * 3 * 4 * 5)


def test_grouped_products_have_the_weights_of_all_groups() -> None:
    """Rows divide among as many experts, of which a token passes some."""
    shape = ProductShape(2 * ROWS, WIDTH, 6, parameter="right", groups=8, ragged="rows")
    found = layer(shape, (8, WIDTH, 6))
    assert isinstance(found, Product)
    assert (found.groups, found.chosen, found.rows) == (8, (2, 8), 2 * TOKENS)
    assert found.idle == 6 * WIDTH * 6


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_is_an_implicit_product(groups: int) -> None:
    """With the FLOP of its groups."""
    shape = ConvolutionShape(
        SAMPLES, (4, 6), groups, (8, 8), (3, 3), (8, 8), (1, 1), (1, 1), transposed=False
    )
    found = layer(shape, (6, 4 // groups, 3, 3))
    assert isinstance(found, Product)
    assert found.flops == 2 * 64 * 6 * 4 // groups * 9
    assert found.elements == 6 * 4 // groups * 9


def test_a_depthwise_convolution_is_elementwise() -> None:
    """Its weight is none of a product."""
    shape = ConvolutionShape(SAMPLES, (4, 4), 4, (8,), (3,), (8,), (1,), (1,), transposed=False)
    assert type(layer(shape, (4, 1, 3))) is Operator


def test_a_module_that_recomputes_by_itself_is_refused() -> None:
    """What runs again is an option of the question."""
    net = language()
    net.run("add", "layers.0", [1], phase="recomputation")
    with pytest.raises(OptionError):
        model(net)


def test_lists_after_each_other_are_chained() -> None:
    """In the order in which they run."""
    net = Network()
    x = net.run("embedding", "table", [net.weight("table.weight", WORDS, WIDTH)])
    for name in ("down.1", "down.0", "up.0", "up.1"):
        x = net.linear(f"{name}.one", x)
    assert [block.name for block in model(net).blocks[1:]] == ["down.1", "down.0", "up.0", "up.1"]


def test_what_runs_between_two_blocks_belongs_to_the_first() -> None:
    """A kernel of no unit."""
    net = language(1)
    x = net.run("relu", "between", [1])
    net.linear("layers.1.up", x)
    first, second = model(net).blocks[1:3]
    assert only(first, Operator).exact[0] > 0
    assert not any(any(op.exact) for op in second.operators)
