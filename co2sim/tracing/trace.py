"""What one training step of a PyTorch module executes and keeps, as plain data.

`from_torch.trace` writes a `Trace`; reading one needs no torch. All sizes are bytes, all work is
FLOP, and kernels are numbered in the order in which they were issued.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Literal

Phase = Literal["forward", "backward", "recomputation"]
Kind = Literal["parameter", "buffer", "input", "gradient", "activation"]


@dataclass(frozen=True, slots=True)
class ProductShape:
    """`batch` matrices of rows x inner by inner x columns.

    `parameter` is the operand that is a parameter, a view of one, or its copy in another type.
    A grouped product has `groups`, which split its rows, or its inner dimension (`ragged`).
    """

    rows: int
    inner: int
    columns: int
    batch: int = 1
    parameter: Literal["", "left", "right"] = ""
    groups: int = 1
    ragged: Literal["", "rows", "inner"] = ""

    @property
    def flop(self) -> int:
        """Two for each product of elements."""
        return 2 * self.batch * self.rows * self.inner * self.columns


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Attention in one kernel; its FLOP count the whole square, causal or not."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    causal: bool
    masked: bool


@dataclass(frozen=True, slots=True)
class ConvolutionShape:
    """A convolution, or the gradients of one that `gradients` names.

    `inputs`, `kernel` and `outputs` are sizes in space; `channels` are (in, out) of all groups.
    """

    batch: int
    channels: tuple[int, int]
    groups: int
    inputs: tuple[int, ...]
    kernel: tuple[int, ...]
    outputs: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    gradients: tuple[Literal["input", "weight"], ...] = ()

    def products(self) -> tuple[ProductShape, ...]:
        """As implicit products of matrices, one a group: forward, or one for each gradient."""
        places = prod(self.inputs if self.transposed else self.outputs)
        rows = self.batch * places
        seen, made = self.channels[::-1] if self.transposed else self.channels
        inner, columns = seen // self.groups * prod(self.kernel), made // self.groups
        forward = ProductShape(rows, inner, columns, self.groups, "right")
        back = ProductShape(rows, columns, inner, self.groups, "right")
        if not self.gradients:
            return (back if self.transposed else forward,)
        weight = ProductShape(inner, rows, columns, self.groups)
        of = {"input": forward if self.transposed else back, "weight": weight}
        return tuple(of[name] for name in self.gradients)


Shape = ProductShape | AttentionShape | ConvolutionShape


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes of a storage that a kernel reads or writes."""

    storage: int
    size: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel as eager PyTorch issues it, behind `views`, operations that make no kernel.

    `dtype` is that of its first output.
    """

    name: str
    module: str
    phase: Phase
    flop: int
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    dtype: str
    width: int
    shape: Shape | None = None
    views: int = 0

    @property
    def bytes_read(self) -> int:
        """Bytes of all inputs."""
        return sum(access.size for access in self.reads)

    @property
    def bytes_written(self) -> int:
        """Bytes of all outputs."""
        return sum(access.size for access in self.writes)


@dataclass(frozen=True, slots=True)
class Storage:
    """Memory of one or more tensors: alive from kernel `born` to before kernel `died`.

    `kept_by` is the module that first saved it for the backward pass; None: no module did.
    """

    size: int
    kind: Kind
    born: int
    died: int
    kept_by: str | None = None


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter; `aliases` are its further paths, where modules share it."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    width: int
    trainable: bool
    storage: int
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """How many elements there are."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the tree; modules with the same `alike` have equal kernels and parameters.

    `received` and `returned` are bytes of the tensors of all its `calls`.
    """

    path: str
    kind: str
    calls: int
    received: int
    returned: int
    buffers: int
    alike: int


@dataclass(frozen=True)
class Trace:
    """One training step: forward, loss, and backward.

    `units` are tokens where the batch is made of them, samples elsewhere; `assumptions` say what
    was not known without data. `seconds` is the wall time of tracing. `plan` names modules that
    tensor-parallel ranks divide; it may be the module's `own_plan`.
    """

    kernels: tuple[Kernel, ...]
    storages: tuple[Storage, ...]
    parameters: tuple[Parameter, ...]
    modules: tuple[Module, ...]
    samples: int
    units: int
    assumptions: tuple[str, ...]
    seconds: float
    plan: Mapping[str, str] = field(default_factory=dict)
    own_plan: bool = False

    @cached_property
    def flop(self) -> int:
        """Of all kernels, recomputation included."""
        return sum(kernel.flop for kernel in self.kernels)

    @cached_property
    def parameter_count(self) -> int:
        """Elements of all parameters, shared ones once."""
        return sum(parameter.numel for parameter in self.parameters)

    @cached_property
    def kept(self) -> int:
        """Bytes of activations that are saved for the backward pass, each storage once."""
        return sum(
            storage.size
            for storage in self.storages
            if storage.kept_by is not None and storage.kind == "activation"
        )

    @cached_property
    def live(self) -> tuple[int, ...]:
        """Bytes of activations that are alive after each kernel."""
        changes = [0] * (len(self.kernels) + 1)
        for storage in self.storages:
            if storage.kind == "activation" and storage.died > storage.born:
                changes[storage.born] += storage.size
                changes[storage.died] -= storage.size
        return tuple(accumulate(changes))

    @property
    def peak(self) -> int:
        """The most bytes of activations that are alive at once."""
        return max(self.live)

    def kernels_of(self, path: str) -> Iterator[Kernel]:
        """Kernels of a module and of all within it; "" is the whole model."""
        below = f"{path}."
        for kernel in self.kernels:
            if not path or kernel.module == path or kernel.module.startswith(below):
                yield kernel


def above(path: str) -> Iterator[str]:
    """The path of a module and all above it, the model itself last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""
