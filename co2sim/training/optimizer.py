"""Optimizers: what each keeps of a parameter, and what it moves and computes in a step.

Files of the catalog (`optimizers/*.toml`) say which moments, factors and matrices there are; the
formulas are here. An optimizer that needs matrices takes them as `Matrix`, and all else as a number
of elements: `trained_tensors` reads both off a model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from co2sim.common.errors import OptionError
from co2sim.common.units import Bytes, Flops
from co2sim.common.validation import Count, Quantity, check
from co2sim.models.operators import Block, Model, Product, Table
from co2sim.schedule.schedule import Compute, DType, Gemm, Kernels

Few = Annotated[int, Quantity(least=0, most=16)]
Iterations = Annotated[int, Quantity(least=0, most=99)]
"""torch/optim/_muon.py refuses 100."""
Side = Annotated[int, Quantity(least=0, most=10**6)]

FP32: Bytes = DType.FP32.bytes

_QR = 4 / 3
"""FLOP of a QR decomposition of a square matrix with its Q, for those of a product of two such:
4/3 n^3 for R and as many for Q, of 2 n^3. Source: Golub and Van Loan 2013, section 5.2."""

_PROJECTIONS = 3
"""Of SOAP: the gradient and its first moment into the eigenbases, and the update back.
Source: nikhilvyas/SOAP, soap.py, `step`."""

_FLOPS = 12.0
"""For an element, of what is done element by element: no more than for Adam."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """`count` trained matrices of `rows` x `columns`; a `table` has a row for each word."""

    rows: int
    columns: int
    count: int = 1
    table: bool = False

    @property
    def elements(self) -> int:
        """Of all."""
        return self.count * self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Tensors:
    """What is trained: matrices, and `others` elements of tensors that are none."""

    matrices: tuple[Matrix, ...] = ()
    others: int = 0

    @property
    def elements(self) -> int:
        """Of all tensors."""
        return sum(matrix.elements for matrix in self.matrices) + self.others


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """An optimizer of mixed precision.

    `master`: fp32, it changes a copy of the parameters in fp32; none, the parameters themselves.
    `moments` are the types of the tensors that it keeps, each as large as the parameter; those in
    int8 have a scale in fp32 for `scale_block` elements. Of a matrix it also keeps a number in fp32
    for every row and column where it is `factored`, and for each side of at most `largest` as many
    `squares` of that side in fp32: a statistic, and its eigenvectors, which a step in `every`
    renews. It makes the update of a matrix orthogonal in `newton_schulz` iterations. `others`
    updates tensors that are no matrices, and embeddings and heads unless `tables` are matrices to
    it (None: it does so itself).
    """

    name: str
    title: str = ""
    """In a few words."""

    master: Literal["fp32", "none"] = "fp32"
    moments: tuple[Literal["fp32", "bf16", "int8"], ...] = ("fp32", "fp32")
    scale_block: Annotated[int, Quantity(least=0, most=10**6)] = 0
    factored: bool = False
    squares: Few = 0
    largest: Side = 0
    every: Count = 1
    newton_schulz: Iterations = 0
    tables: bool = True
    others: Any = None
    """Another `Optimizer`."""

    def __post_init__(self) -> None:
        """Refuse what no optimizer can be."""
        check(self, self.name)
        if len(self.moments) > _MOST:
            raise OptionError(
                f"{self.name}: moments are {len(self.moments)}; there may be {_MOST} at most"
            )
        if bool(self.squares) != bool(self.largest):
            raise OptionError(
                f"{self.name}: squares is {self.squares} and largest {self.largest}; give both, or"
                " none"
            )

    @property
    def owned_whole(self) -> bool:
        """Whether one rank must have all states of a matrix: no share of these is of use."""
        return self.squares > 0

    @property
    def needs_whole(self) -> bool:
        """Whether the update of a part of a matrix needs all of the matrix."""
        return self.squares > 0 or self.newton_schulz > 0

    @property
    def needs_shapes(self) -> bool:
        """Whether it is another for matrices than for other tensors."""
        return self.needs_whole or self.factored or self.others is not None

    def of(self, matrix: Matrix) -> bool:
        """Whether it takes a matrix for one."""
        return self.tables or not matrix.table

    @property
    def _moments(self) -> Bytes:
        """Of an element, with their scales."""
        scale = FP32 / self.scale_block if self.scale_block else 0.0
        widths = [DType(name).bytes + (scale if name == "int8" else 0) for name in self.moments]
        return float(sum(widths))

    def _sides(self, matrix: Matrix) -> Iterator[tuple[int, int]]:
        """The sides that have squares, each with the other one."""
        for side, other in ((matrix.rows, matrix.columns), (matrix.columns, matrix.rows)):
            if side <= self.largest:
                yield side, other

    def states(self, tensors: Tensors) -> Bytes:
        """What it keeps but for master copies."""
        return self._sum(tensors, self.squares)

    def moved(self, tensors: Tensors, width: Bytes) -> Bytes:
        """What a step reads and writes for gradients and parameters of `width` bytes.

        Gradients are read, parameters written, and states and master copies read and written; where
        there is no master copy, parameters are read. Of two squares only the statistic changes in
        every step. Products of matrices read and write more (`products`).
        """
        kept = self._sum(tensors, min(self.squares, 1))
        kept += 0.0 if width == FP32 or self.master == "none" else FP32 * tensors.elements
        return tensors.elements * (2 + (self.master == "none")) * width + 2 * kept

    def _sum(self, tensors: Tensors, squares: int) -> Bytes:
        rest: Optimizer = self.others or self
        kept = rest._moments * tensors.others
        for matrix in tensors.matrices:
            if not self.of(matrix):
                kept += rest._moments * matrix.elements
                continue
            kept += self._moments * matrix.elements
            factors = matrix.rows + matrix.columns if self.factored else 0
            square = sum(side**2 for side, _ in self._sides(matrix))
            kept += matrix.count * FP32 * (factors + squares * square)
        return kept

    def flops(self, tensors: Tensors) -> Flops:
        """Of what a step does element by element."""
        return _FLOPS * tensors.elements

    def products(self, matrix: Matrix, precision: DType) -> tuple[Gemm, ...]:
        """Of a step over matrices, in a job of that precision.

        Newton-Schulz, in 16 bits, for the shorter side m and the longer n: an iteration has the
        products of m x n with its transpose, of that with itself, and with m x n. Source: torch
        2.13, torch/optim/_muon.py. Squares, in fp32: the statistic, `_PROJECTIONS`, and once in
        `every` steps a product with the old eigenvectors and its QR decomposition. Source: Vyas et
        al. 2024, SOAP, arXiv 2409.11321, algorithms 3 and 4.
        """
        if not self.of(matrix):
            return ()
        m, n = sorted((matrix.rows, matrix.columns))
        made: list[Gemm] = []
        if self.newton_schulz:
            often, half = float(matrix.count * self.newton_schulz), precision.bytes < FP32
            other = "" if half else str(DType.BF16)
            shapes = ((m, n, m), (m, m, m), (m, m, n))
            made += [Gemm(*shape, DType.BF16.bytes, count=often, narrow=other) for shape in shapes]
        other = "" if precision is DType.FP32 else str(DType.FP32)
        for side, long in self._sides(matrix) if self.squares else ():
            made += [
                Gemm(side, inner, columns, FP32, count=often * matrix.count, narrow=other)
                for inner, columns, often in (
                    (long, side, 1.0),
                    (side, long, float(_PROJECTIONS)),
                    (side, side, (1 + _QR) / self.every),
                )
            ]
        return tuple(made)


_NORM = 2
"""Parameters of a norm for each column: a weight and a bias."""

_MOST = 16
"""Of tensors as large as the parameter."""

ADAMW = Optimizer(name="adamw")
"""The default, as its file in the catalog says: a test compares them."""


@dataclass(frozen=True)
class Update:
    """A step of an optimizer over what one GPU trains: `dense` tensors, and `experts`."""

    optimizer: Optimizer
    precision: DType
    dense: Tensors
    experts: Tensors

    @classmethod
    def of(cls, model: Model, optimizer: Optimizer, precision: DType) -> "Update":
        """Of a model. Raises OptionError where the optimizer needs matrices, and none is known."""
        if optimizer.needs_shapes:
            dense, experts = trained_tensors(model)
            if model.trained_parameters and not (dense.matrices or experts.matrices):
                raise OptionError(
                    f"optimizer={optimizer.name} does not apply to {model.name}: nothing is known"
                    " of its matrices"
                )
        else:
            apart = model.trained_experts
            dense, experts = Tensors((), model.trained_parameters - apart), Tensors((), apart)
        return cls(optimizer, precision, dense, experts)

    @property
    def states(self) -> tuple[Bytes, Bytes]:
        """What the optimizer keeps of each but for master copies."""
        return self.optimizer.states(self.dense), self.optimizer.states(self.experts)

    @property
    def master_bytes(self) -> Bytes:
        """Of a parameter as it is changed: its master copy, or itself."""
        return self.precision.bytes if self.optimizer.master == "none" else FP32

    @property
    def has_copies(self) -> bool:
        """Whether master copies are kept: parameters in fp32 are themselves."""
        return self.master_bytes > self.precision.bytes

    @property
    def elements(self) -> int:
        """Of all tensors."""
        return self.dense.elements + self.experts.elements

    def by_elements(self, elements: int) -> Compute:
        """What is done element by element for `elements` parameters."""
        parts, made = (self.dense, self.experts), self.optimizer
        share = elements / max(1, self.elements)
        moved = sum(made.moved(tensors, self.precision.bytes) for tensors in parts)
        flops = sum(made.flops(tensors) for tensors in parts)
        return Compute("optimizer", flops * share, moved * share)

    def products(self, matrices: Sequence[Matrix], share: float = 1.0) -> Compute:
        """The products over whole matrices, or a share of them."""
        products = tuple(
            product.times(share)
            for matrix in matrices
            for product in self.optimizer.products(matrix, self.precision)
        )
        return Compute(
            "orthogonalize" if self.optimizer.newton_schulz else "precondition",
            sum(product.flops for product in products),
            sum(product.bytes for product in products),
            Kernels(products, sum(product.count for product in products), 0.0),
        )


def trained_tensors(model: Model) -> tuple[Tensors, Tensors]:
    """What is trained of a model: of all ranks, and of experts that ranks divide.

    A matrix is the weight of a product. Embeddings, positions and the head are tables. Biases,
    norms and what no product says are other tensors.
    """
    dense: list[Matrix] = []
    experts: list[Matrix] = []
    for index, block in enumerate(model.blocks):
        for op in block.operators:
            if op.frozen:
                continue
            if isinstance(op, Table) and op.width > 1 and not index:
                dense.append(Matrix(op.entries, op.width, table=True))
                dense.extend(_positions(block, op.width))
            elif isinstance(op, Product) and op.tensors:
                (experts if op.apart > 1 else dense).extend(
                    Matrix(
                        op.inner,
                        width,
                        op.groups or 1,
                        bool(block.logits) and op.columns > op.inner,
                    )
                    for width in op.widths or (op.columns,)
                )
    return (
        _with_others(dense, model.trained_parameters - model.trained_experts),
        _with_others(experts, model.trained_experts),
    )


def _positions(block: Block, width: int) -> Iterator[Matrix]:
    """The tables beside a vocabulary of that width: a norm has two rows at most."""
    for op in block.operators:
        if not isinstance(op, Table) and not op.frozen:
            rows = (divmod(size, width) for size in op.tensors)
            yield from (Matrix(n, width, table=True) for n, rest in rows if n > _NORM and not rest)


def states_per_parameter(optimizer: Optimizer, model: Model) -> Bytes:
    """What it keeps on average for what is trained of a model, but for master copies."""
    update = Update.of(model, optimizer, DType.BF16)
    return sum(update.states) / max(1, update.elements)


def _with_others(matrices: list[Matrix], elements: int) -> Tensors:
    shaped = sum(matrix.elements for matrix in matrices)
    return Tensors(tuple(matrices), max(0, elements - shaped))
