"""From the trace of a module to a model: repeated modules are its blocks, kernels its operators.

Blocks are the units of communication: entries of a list of modules of which two or more are alike.
What runs before the first of them is the block "embedding", what runs behind the last "head", and
what runs between two belongs to the first of these. Sizes are those of a sample, in elements of the
type that most products have. Products and attention have an operator each; all other kernels
of a block are one, which moves the bytes that these move. Parameters, their copies and their
gradients are not among these bytes, which grow with the batch.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from co2sim.common.errors import OptionError
from co2sim.models.operators import (
    AnyOperator,
    Attention,
    Block,
    Compiled,
    CrossEntropy,
    Cut,
    Model,
    Operator,
    Product,
    Table,
    TensorExchange,
)
from co2sim.tracing.tp_plan import Division, columns_of, division_of
from co2sim.tracing.trace import (
    AttentionShape,
    ConvolutionShape,
    Kernel,
    Parameter,
    ProductShape,
    Trace,
    above,
)

_COPIES = {"_to_copy", "clone", "copy_", "constant_pad_nd", "slice_backward", "slice_scatter"}
"""Kernels that PyTorch's cross entropy has between a product and the loss."""
_LOSSES = {"nll_loss_forward", "nll_loss2d_forward"}
_LOSS_BACKWARD = {"nll_loss_backward", "nll_loss2d_backward", "_log_softmax_backward_data"}
_INDEX_BYTES = 8
_TWO = 2
"""Blocks that read what one hands to the next: with a shortcut past that. More read what all share,
such as positions."""
_NOT_FUSED = (
    *("sort", "topk", "embedding", "index", "scatter", "gather", "cumsum", "pool", "upsample"),
    *("convolution", "histc", "bincount", "multinomial", "nonzero", "unique", "co2sim"),
)
"""Parts of the names of kernels that a compiler leaves alone."""


def model_of(trace: Trace, name: str) -> Model:
    """The model of a trace. Raises OptionError for a module that recomputes by itself."""
    if any(kernel.phase == "recomputation" for kernel in trace.kernels):
        raise OptionError(
            f"{name} recomputes activations by itself (torch.utils.checkpoint); build it without,"
            " and ask for that by --recompute"
        )
    step = _Step(trace)
    made: dict[tuple[AnyOperator, ...], tuple[AnyOperator, ...]] = {}
    blocks = []
    for index, block in enumerate(step.names):
        operators = _Block(step, index).operators
        if operators:
            shared = made.setdefault(operators, operators)
            blocks.append(Block(block, shared, step.boundary(index, shared)))
    tokens = trace.units // trace.samples
    return Model(
        name,
        tuple(blocks),
        tokens,
        _unit(trace),
        divisible="tp" if step.division.styles else False,
        assumed=trace.assumptions,
        undivided=step.division.refusal,
    )


def _unit(trace: Trace) -> str:
    if trace.units > trace.samples:
        return "token"
    shapes = (kernel.shape for kernel in trace.kernels)
    flat = any(isinstance(s, ConvolutionShape) and len(s.kernel) == _TWO for s in shapes)
    return "image" if flat else "sample"


# --- units ---------------------------------------------------------------------------------------


class _Tree:
    """The modules of a trace, of which some are units."""

    def __init__(self, trace: Trace) -> None:
        self.modules = {module.path: module for module in trace.modules}
        self.children: dict[str, list[str]] = {path: [] for path in self.modules}
        for path in self.modules:
            if path:
                self.children[path.rpartition(".")[0]].append(path)
        self.products: set[str] = set()
        for kernel in trace.kernels:
            if kernel.shape is not None:
                self.products.update(above(kernel.module))
        self.parameters: Counter[str] = Counter()
        for parameter in trace.parameters:
            for path in above(parameter.path.rpartition(".")[0]):
                self.parameters[path] += parameter.numel

    def units(self) -> list[str]:
        """Entries of lists that are alike; else of one class; else the parts of the whole.

        A module between two lists that has as many parameters as an entry is a unit, too.
        """
        return self._listed("", "alike") or self._listed("", "kind") or self._parts("")

    def _working(self, path: str) -> list[str]:
        return [child for child in self.children[path] if child in self.products]

    def _listed(self, path: str, by: str) -> list[str]:
        working = self._working(path)
        composite = [child for child in working if self.children[child]]
        repeated = self._repeated(composite or working, by)
        if repeated and self._is_list(path):
            return working
        inner = {child: self._listed(child, by) for child in working}
        units = [unit for entries in inner.values() for unit in entries]
        if composite and repeated and not any(self.children[unit] for unit in units):
            return repeated
        if not units:
            return []
        size = min(self.parameters[unit] for unit in units)
        kinds = {self.modules[child].kind for child, entries in inner.items() if entries}
        for child in composite:
            if self.modules[child].kind in kinds:
                inner[child] = inner[child] or self._listed(child, "kind")
        holding = [index for index, entries in enumerate(inner.values()) if entries]
        for child in working[holding[0] : holding[-1]]:
            if child in composite and self.parameters[child] >= size:
                inner[child] = inner[child] or [child]
        return [unit for entries in inner.values() for unit in entries]

    def _repeated(self, paths: Sequence[str], by: str) -> list[str]:
        """Those of which there are two or more; of a single entry of a list that one."""
        alike = Counter(getattr(self.modules[path], by) for path in paths)
        least = 1 if by == "kind" and len(paths) == 1 and self.children[paths[0]] else _TWO
        return [path for path in paths if alike[getattr(self.modules[path], by)] >= least]

    def _is_list(self, path: str) -> bool:
        names = [child.rpartition(".")[2] for child in self.children[path]]
        return all(name.isdecimal() for name in names)

    def _parts(self, path: str) -> list[str]:
        working = self._working(path)
        if len(working) == 1:
            return self._parts(working[0]) or working
        return working


# --- which block a kernel belongs to --------------------------------------------------------------


class _Step:
    """A trace with the blocks that its kernels, storages and parameters belong to."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.kernels = trace.kernels
        self.forward = [i for i, kernel in enumerate(self.kernels) if kernel.phase == "forward"]
        units = set(_Tree(trace).units())
        self._unit = {
            module.path: next((path for path in above(module.path) if path in units), None)
            for module in trace.modules
        }
        in_order = dict.fromkeys(self._unit[self.kernels[i].module] for i in self.forward)
        self.names = ["embedding", *(path for path in in_order if path is not None), "head"]
        self._place = {name: index for index, name in enumerate(self.names)}
        self.owner = self._owners()
        self.loss = _loss(self)

    def _owners(self) -> list[int]:
        """The block of each kernel."""
        places = [self._place.get(self._unit[k.module] or "") for k in self.kernels]
        last = max((i for i in self.forward if places[i] is not None), default=-1)
        owners: list[int] = []
        outside: dict[str, set[int]] = {}
        now, head = 0, len(self.names) - 1
        end = max((i for i, block in enumerate(places) if block is not None), default=-1)
        for i, (kernel, block) in enumerate(zip(self.kernels, places, strict=True)):
            forward = kernel.phase == "forward"
            if block is not None:
                now = block
            elif forward:
                now = head if i > last else now
                outside.setdefault(kernel.module, set()).add(now)
            else:
                blocks = outside.get(kernel.module, set())
                single = next(iter(blocks)) if len(blocks) == 1 else None
                before = 0 if i > end else now if now == head else max(now - 1, 0)
                owners.append(before if single is None else single)
                continue
            owners.append(now)
        return owners

    @cached_property
    def width(self) -> int:
        """Bytes of the type that most products have."""
        flops: Counter[int] = Counter()
        for i in self.forward:
            flops[self.kernels[i].width] += self.kernels[i].flop
        return flops.most_common(1)[0][0] if flops.total() else 4

    def elements(self, size: float) -> float:
        """Those of a sample, of bytes of the batch."""
        return size / (self.width * self.trace.samples)

    @cached_property
    def weights(self) -> Mapping[int, Parameter]:
        """Parameters by their storages, and by those of copies in another type."""
        parameters = {parameter.storage: parameter for parameter in self.trace.parameters}
        for kernel in self.kernels:
            if kernel.name in {"_to_copy", "clone"} and kernel.reads and kernel.writes:
                parameter = parameters.get(kernel.reads[0].storage)
                if parameter is not None:
                    parameters[kernel.writes[0].storage] = parameter
        return parameters

    @cached_property
    def division(self) -> Division:
        """What tensor-parallel ranks divide."""
        return division_of(self.trace, self.weights)

    def cut(self, storage: int) -> Cut:
        """What ranks divide of a storage."""
        return "width" if storage in self.division.storages else ""

    def cut_of(self, kernel: Kernel) -> Cut:
        """What they divide of the output of a kernel."""
        return next((self.cut(access.storage) for access in kernel.writes), "")

    @cached_property
    def first_use(self) -> Mapping[str, int]:
        """The block that uses a parameter first; of one that nothing uses the head."""
        blocks: dict[str, int] = {}
        for i in self.forward:
            for access in self.kernels[i].reads:
                if access.storage in self.weights:
                    blocks.setdefault(self.weights[access.storage].path, self.owner[i])
        return blocks

    @cached_property
    def readers(self) -> Mapping[int, list[int]]:
        """The kernels that read a storage."""
        indices: dict[int, list[int]] = {}
        for i, kernel in enumerate(self.kernels):
            for access in kernel.reads:
                indices.setdefault(access.storage, []).append(i)
        return indices

    @cached_property
    def writers(self) -> Mapping[int, int]:
        """The kernel that writes a storage first."""
        indices: dict[int, int] = {}
        for i, kernel in enumerate(self.kernels):
            for access in kernel.writes:
                indices.setdefault(access.storage, i)
        return indices

    @cached_property
    def kept(self) -> Mapping[int, int]:
        """The blocks of storages that are kept, but for what the loss and attention add."""
        blocks = {}
        for storage_index, storage in enumerate(self.trace.storages):
            writer = self.writers.get(storage_index)
            if (
                storage.kept_by is None
                or storage.kind != "activation"
                or storage_index in self.weights
            ):
                continue
            if writer is None or writer in self.loss.kernels:
                continue
            made = self.kernels[writer]
            if isinstance(made.shape, AttentionShape) and made.writes[0].storage != storage_index:
                continue  # the log-sum-exp, which attention counts itself
            users = (writer, *self.readers.get(storage_index, ()))
            saver = next((i for i in users if self.kernels[i].module == storage.kept_by), writer)
            shared = len(self.reading(storage_index)) > _TWO
            blocks[storage_index] = self.owner[writer if shared else saver]
        return blocks

    def reading(self, storage: int) -> set[int]:
        """The blocks whose forward passes read a storage."""
        users = self.readers.get(storage, ())
        return {self.owner[i] for i in users if self.kernels[i].phase == "forward"}

    def counts(self, storage: int) -> bool:
        """Whether bytes of a storage grow with the batch."""
        kind = self.trace.storages[storage].kind
        return storage not in self.weights and kind in {"activation", "input"}

    def boundary(self, block: int, operators: Sequence[AnyOperator]) -> float:
        """Elements that a unit gets of the block before it: those that few others read."""
        head = block == len(self.names) - 1
        if not block or (head and not any(isinstance(op, CrossEntropy) for op in operators)):
            return 0.0
        few, many = 0, 0
        for storage in self.readers:
            writer = self.writers.get(storage)
            before = 0 if writer is None else self.owner[writer]
            if before != block - 1 or not self.counts(storage):
                continue
            owners, size = self.reading(storage), self.trace.storages[storage].size
            if block in owners and len(owners) <= _TWO:
                few += size
            elif block in owners:
                many = max(many, size)
        return self.elements(few or many)


@dataclass(frozen=True, slots=True)
class _Loss:
    """The kernels of PyTorch's cross entropy, and what stands for them by block."""

    kernels: frozenset[int]
    operators: Mapping[int, tuple[CrossEntropy, ...]]


def _loss(step: _Step) -> _Loss:
    """Cross entropies: log-softmax, the loss of its rows, and copies on the way."""
    kernels, samples = step.kernels, step.trace.samples
    dropped: set[int] = set()
    made: dict[int, tuple[CrossEntropy, ...]] = {}
    for i in step.forward:
        if kernels[i].name not in _LOSSES or len(kernels[i].reads) < _TWO:
            continue
        of, target = kernels[i].reads[:2]
        source = step.writers.get(of.storage)
        if source is None or kernels[source].name != "_log_softmax":
            continue
        members, rows = {i, source}, target.size // _INDEX_BYTES
        size = kernels[source].writes[0].size // kernels[source].width
        while (before := step.writers.get(kernels[source].reads[0].storage)) is not None:
            if kernels[before].name not in _COPIES:
                break
            members.add(before)
            source = before
        loss = CrossEntropy(
            name="loss",
            rows=-(-rows // samples),
            columns=size // rows,
            vocabulary=bool(step.cut(kernels[source].reads[0].storage)),
            calls=len(members),
            moved=0.0,
        )
        made[step.owner[i]] = (*made.get(step.owner[i], ()), loss)
        members |= {
            j
            for j, kernel in enumerate(kernels)
            if kernel.phase == "backward"
            and step.owner[j] == step.owner[i]
            and (
                kernel.name in _LOSS_BACKWARD
                or (
                    kernel.name in _COPIES
                    and sum(w.size for w in kernel.writes) >= size * kernel.width
                )
            )
        }
        dropped |= members
    return _Loss(frozenset(dropped), made)


# --- operators of a block -------------------------------------------------------------------------


class _Block:
    """The operators of one block of a trace."""

    def __init__(self, step: _Step, index: int) -> None:
        self.step = step
        self.index = index
        self.inputs: set[int] = set()
        mine = [
            i for i, owner in enumerate(step.owner) if owner == index and i not in step.loss.kernels
        ]
        forward = [i for i in mine if step.kernels[i].phase == "forward"]
        self.products = [i for i in forward if _is_product(step.kernels[i])]
        self.plain = [i for i in forward if not _is_product(step.kernels[i])]
        backward = [i for i in mine if step.kernels[i].phase == "backward"]
        self.fused = _Fused(step, index, forward, backward)
        self.backward = [i for i in backward if not _is_product(step.kernels[i])]

    @property
    def operators(self) -> tuple[AnyOperator, ...]:
        """Products and attention in order, then all else, and the loss."""
        step = self.step
        of = {
            storage: step.writers[storage]
            for storage, block in step.kept.items()
            if block == self.index
        }
        compiled = {storage: step.writers[storage] for storage in self.fused.kept}
        left = self._own_parameters()
        made = [
            op for i in self.products for op in self._working(i, left, _of(i, of), _of(i, compiled))
        ]
        apart = set(self.products)
        kept = [storage for storage, i in of.items() if i not in apart]
        fused = [storage for storage, i in compiled.items() if i not in apart]
        return (
            *self._tables(left),
            *made,
            *self._rest(left, kept, fused),
            *step.loss.operators.get(self.index, ()),
        )

    def _own_parameters(self) -> dict[str, Parameter]:
        head = len(self.step.names) - 1
        use = self.step.first_use
        return {
            p.path: p for p in self.step.trace.parameters if use.get(p.path, head) == self.index
        }

    def _sizes(self, storages: Iterable[int]) -> float:
        return self.step.elements(sum(self.step.trace.storages[n].size for n in storages))

    def _working(
        self, i: int, left: dict[str, Parameter], kept: list[int], compiled: list[int]
    ) -> Iterator[AnyOperator]:
        """The operators of a kernel that multiplies; it takes its weight out of those `left`."""
        step, kernel = self.step, self.step.kernels[i]
        if isinstance(kernel.shape, AttentionShape):
            op: AnyOperator = _attention(kernel.shape, step.trace.samples)
        else:
            weight = self._weight(kernel)
            tensor = left.pop(weight.path, None) if weight else None
            op = _product(kernel, weight, step.trace, wide=kernel.width > step.width)
            if weight:
                elsewhere = step.first_use[weight.path] != self.index
                op = replace(
                    op,
                    tensors=(tensor.numel,) if tensor else (),
                    tied=elsewhere,
                    frozen=not weight.trainable,
                )
        size, fused = self._sizes(kept) / op.rows, self._sizes(compiled) / op.rows
        if isinstance(op, Product):
            op = self._along(kernel, op)
        elif isinstance(op, Attention) and step.cut_of(kernel):
            op = replace(op, keys=self._keys(kernel, op))
        made = replace(
            op,
            calls=1 + kernel.views,
            kept=size,
            moved=0.0,
            compiled=Compiled((0.0, 0.0), fused, 1),
            cut=step.cut_of(kernel),
        )
        yield from self._exchanged(kernel, made) if isinstance(made, Product) else (made,)

    def _exchanged(self, kernel: Kernel, op: Product) -> Iterator[AnyOperator]:
        """A product between what ranks exchange: an input once, of all products that read it."""
        columns = op.along == "columns"
        if columns and (source := self._source(kernel)) not in self.inputs:
            self.inputs.add(source)
            yield TensorExchange(rows=op.rows, side="input", width=op.inner)
        yield op
        if op.along == "inner" or (columns and not op.cut):
            yield TensorExchange(rows=op.rows, side="output", width=op.columns, gathers=columns)

    def _along(self, kernel: Kernel, op: Product) -> Product:
        """A product with what ranks divide of it."""
        style = self.step.division.styles.get(kernel.module)
        if op.count:
            heads = bool(self.step.cut_of(kernel))
            return replace(op, along="heads", what="heads") if heads else op
        if not style:
            return op
        if style == "rowwise":
            return replace(op, along="inner", what=f"inputs of {op.name}")
        losses = self.step.loss.operators.get(self.index, ())
        padded = style == "gathered" or any(loss.columns == op.columns for loss in losses)
        what = "" if padded else f"columns of {op.name}"
        return replace(op, along="columns", padded=padded, what=what)

    def _source(self, kernel: Kernel) -> int:
        """What a product reads beside its weight, of copies the original."""
        step = self.step
        storage = next(x.storage for x in kernel.reads if x.storage not in step.weights)
        while (writer := step.writers.get(storage)) is not None:
            if step.kernels[writer].name not in {"_to_copy", "clone"}:
                break
            storage = step.kernels[writer].reads[0].storage
        return storage

    def _keys(self, kernel: Kernel, op: Attention) -> int:
        """Heads that have keys: those of the product that makes them, before they are repeated."""
        made = self.step.division.storages.get(kernel.reads[1].storage, frozenset[int]())
        columns = [columns_of(self.step.kernels[i]) for i in made]
        heads, rest = divmod(sum(columns), op.wide)
        return op.keys if rest or len(columns) != 1 else min(op.keys, heads)

    def _tables(self, left: dict[str, Parameter]) -> Iterator[AnyOperator]:
        """Parameters of colwise modules and look-ups, taken out of those `left`."""
        styles = self.step.division.styles
        for path, p in list(left.items()):
            module = path.rpartition(".")[0]
            if styles.get(module, "rowwise") != "rowwise":
                del left[path]
                width = p.numel // p.shape[0]
                yield Table(entries=p.shape[0], width=width, frozen=not p.trainable)
        for kernel in (self.step.kernels[i] for i in self.plain):
            if kernel.name == "embedding" and kernel.module in styles:
                made = self.step.elements(kernel.writes[0].size)
                yield TensorExchange(side="output", width=math.ceil(made))

    def _weight(self, kernel: Kernel) -> Parameter | None:
        """The parameter that a product multiplies by: the largest that it reads."""
        reads = [self.step.weights.get(access.storage) for access in kernel.reads]
        parameters = [parameter for parameter in reads if parameter is not None]
        named = isinstance(kernel.shape, ConvolutionShape) or (
            isinstance(kernel.shape, ProductShape) and kernel.shape.parameter
        )
        return max(parameters, key=lambda p: p.numel, default=None) if named else None

    def _rest(
        self, left: Mapping[str, Parameter], kept: Sequence[int], fused: Sequence[int]
    ) -> Iterator[Operator]:
        """All other kernels, on what ranks divide and on what is whole, and other parameters."""
        step = self.step
        trained = tuple(p.numel for p in left.values() if p.trainable)
        frozen = tuple(p.numel for p in left.values() if not p.trainable)
        cuts: tuple[Cut, ...] = ("width", "")
        for cut in cuts:
            mine = [k for k in (step.kernels[i] for i in self.plain) if step.cut_of(k) == cut]
            moved = [sum(self._moved(i, cut) for i in of) for of in (self.plain, self.backward)]
            sizes = [self._sizes(n for n in of if step.cut(n) == cut) for of in (kept, fused)]
            op = Operator(
                name="elementwise",
                tensors=() if cut else trained,
                work=sum(kernel.flop for kernel in mine) / step.trace.samples,
                calls=sum(1 + kernel.views for kernel in mine),
                kept=sizes[0],
                moved=0.0,
                exact=(step.elements(moved[0]), step.elements(moved[1])),
                compiled=self.fused.compiled(sizes[1], cut),
                cut=cut,
            )
            if op.tensors or any(op.exact) or op.calls or op.kept:
                yield op
        if frozen:
            yield Operator(name="frozen", tensors=frozen, frozen=True, moved=0.0)

    def _moved(self, i: int, cut: Cut) -> int:
        kernel = self.step.kernels[i]
        return sum(
            access.size
            for access in (*kernel.reads, *kernel.writes)
            if self.step.counts(access.storage) and self.step.cut(access.storage) == cut
        )


def _of(i: int, writers: Mapping[int, int]) -> list[int]:
    return [storage for storage, writer in writers.items() if writer == i]


def _is_product(kernel: Kernel) -> bool:
    """Whether a kernel multiplies matrices; a depthwise convolution is elementwise."""
    shape = kernel.shape
    depthwise = isinstance(shape, ConvolutionShape) and 1 < shape.groups == shape.channels[0]
    return shape is not None and not depthwise


def _product(kernel: Kernel, weight: Parameter | None, trace: Trace, *, wide: bool) -> Product:
    """A product with weights, whose rows are those of a sample; or as many of every sample."""
    shape = kernel.shape
    if isinstance(shape, ConvolutionShape):
        (shape,) = shape.products()
    assert isinstance(shape, ProductShape)
    if weight is None:
        return _of_activations(shape, trace.samples)
    rows, inner, columns = shape.rows, shape.inner, shape.columns
    if shape.parameter == "left":
        rows, columns = columns, rows
    groups = shape.groups if shape.ragged else max(1, weight.numel // (inner * columns))
    rows = -(-rows * (1 if shape.ragged else shape.batch) // trace.samples)
    tokens = trace.units // trace.samples
    routed = bool(shape.ragged) and tokens > 1 and not rows % tokens
    return Product(
        name=weight.path.rpartition(".")[0].rpartition(".")[2],
        rows=rows,
        inner=inner,
        columns=columns,
        groups=groups if groups > 1 else 0,
        chosen=(min(rows // tokens, groups), groups) if routed else None,
        wide=wide,
    )


def _of_activations(shape: ProductShape, samples: int) -> Product:
    apart = shape.batch >= samples
    return Product(
        name="activations",
        rows=shape.rows if apart else -(-shape.rows // samples),
        inner=shape.inner,
        columns=shape.columns,
        count=-(-shape.batch // samples) if apart else shape.batch,
        wide=True,
    )


def _attention(shape: AttentionShape, samples: int) -> Attention:
    often = shape.batch / samples  # windows of an image are apart
    return Attention(
        name="attention",
        rows=shape.queries,
        heads=max(1, round(shape.heads * often)),
        keys=max(1, round(shape.kv_heads * often)),
        wide=shape.head_dim,
        value=shape.value_dim,
        length=shape.keys,
        causal=shape.causal,
    )


# --- what a compiler makes of it ------------------------------------------------------------------


class _Fused:
    """What torch.compile makes of a block: chains of elementwise kernels as one kernel.

    Kernels that the same products lie behind are one, which reads its inputs once and writes what
    others read. An operand of a product is kept for its gradients; what only elementwise kernels
    need of a forward pass is computed again where its inputs are smaller.

    Source: PyTorch 2.13, torch/_functorch/partitioners.py, ban_recompute_materialized_backward;
    torch/_inductor/scheduler.py, can_fuse.
    """

    def __init__(
        self, step: _Step, index: int, forward: Sequence[int], backward: Sequence[int]
    ) -> None:
        self.step = step
        self.kept = {storage for storage, block in step.kept.items() if block == index}
        self.again: dict[int, dict[int, int]] = {}
        self.chains, self.back = self._chains(forward), self._chains(backward)
        for chain in self.chains:
            self._drop(chain)

    def compiled(self, kept: float, cut: Cut) -> Compiled:
        """Of what ranks divide so."""
        step = self.step
        forward, backward = (
            step.elements(sum(self._bytes(chain, cut) for chain in chains))
            for chains in (self.chains, self.back)
        )
        mine = [chain for chain in self.chains if step.cut_of(step.kernels[chain[-1]]) == cut]
        return Compiled((forward, backward), kept, len(mine))

    def _chains(self, indices: Sequence[int]) -> list[list[int]]:
        """Kernels but for products, those that are one together."""
        levels: dict[int, int] = {}
        chains: dict[tuple[int, int], list[int]] = {}
        for i in indices:
            kernel = self.step.kernels[i]
            level = max((levels.get(access.storage, 0) for access in kernel.reads), default=0)
            alone = kernel.shape is not None or any(part in kernel.name for part in _NOT_FUSED)
            if not _is_product(kernel):
                chains.setdefault((level, i if alone else -1), []).append(i)
            for access in kernel.writes:
                levels[access.storage] = max(level + alone, levels.get(access.storage, 0))
        return list(chains.values())

    def _inputs(self, chain: Sequence[int]) -> dict[int, int]:
        """Bytes of the storages that a chain reads and does not write before."""
        sizes: dict[int, int] = {}
        written: set[int] = set()
        for i in chain:
            for access in self.step.kernels[i].reads:
                if access.storage not in written and self.step.counts(access.storage):
                    sizes[access.storage] = max(access.size, sizes.get(access.storage, 0))
            written.update(access.storage for access in self.step.kernels[i].writes)
        return sizes

    def _drop(self, chain: Sequence[int]) -> None:
        """Keep the inputs of a chain in place of what only other chains need of it."""
        step = self.step
        if any(part in step.kernels[chain[0]].name for part in _NOT_FUSED):
            return
        dropped = {
            access.storage
            for i in chain
            for access in step.kernels[i].writes
            if access.storage in self.kept and not self._operand(access.storage)
        }
        inputs = self._inputs(chain)
        storages = step.trace.storages
        more = {n for n in inputs if n not in self.kept and storages[n].kind == "activation"}
        more = {n for n in more if n in step.writers}
        if sum(storages[n].size for n in dropped) > sum(storages[n].size for n in more):
            self.kept = (self.kept - dropped) | more
            self.again |= dict.fromkeys(dropped, inputs)

    def _operand(self, storage: int) -> bool:
        """Whether a backward pass multiplies by it."""
        return any(
            self.step.kernels[i].phase == "backward" and self.step.kernels[i].shape is not None
            for i in self.step.readers.get(storage, ())
        )

    def _bytes(self, chain: Sequence[int], cut: Cut) -> int:
        """What one kernel in place of a chain reads and writes, of what ranks divide so."""
        step, mine = self.step, set(chain)
        reads: dict[int, int] = {}
        for storage, size in self._inputs(chain).items():
            for origin, held in self.again.get(storage, {storage: size}).items():
                reads[origin] = max(held, reads.get(origin, 0))
        writes: dict[int, int] = {}
        forward = step.kernels[chain[0]].phase == "forward"
        for i in chain:
            for access in step.kernels[i].writes:
                storage = access.storage
                if not step.counts(storage) or not self._is_read(storage, mine, forward=forward):
                    continue
                writes[storage] = max(access.size, writes.get(storage, 0))
        sizes = (*reads.items(), *writes.items())
        return sum(size for storage, size in sizes if step.cut(storage) == cut)

    def _is_read(self, storage: int, chain: set[int], *, forward: bool) -> bool:
        """Whether a kernel of the same pass outside of a chain reads it, or it is kept."""
        if forward and storage in self.kept:
            return True
        phase = "forward" if forward else "backward"
        return any(
            i not in chain and self.step.kernels[i].phase == phase
            for i in self.step.readers.get(storage, ())
        )
