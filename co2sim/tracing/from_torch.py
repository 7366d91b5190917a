"""What a training step of any PyTorch module executes: one forward and backward on fake tensors.

Fake tensors have shapes and no memory, so that a model of any size is traced without a GPU. They
are on the device "cpu": "cuda" needs a build of PyTorch for CUDA, and its autograd ends the process
elsewhere. Where the CPU would run other kernels than a GPU (attention, dropout, RMS norms, types
under autocast), those of the GPU are put in their place, so that every build gives one answer.

The only module of co2sim that imports torch; nothing imports it before a module is traced.
"""

import json
import logging
import sys
import sysconfig
import time
import traceback
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from unittest import mock
from weakref import ref

from co2sim.common.errors import OptionError, cut, given
from co2sim.common.files import is_regular
from co2sim.tracing.tp_plan import plan_of
from co2sim.tracing.trace import (
    Access,
    AttentionShape,
    ConvolutionShape,
    Kernel,
    Kind,
    Module,
    Parameter,
    Phase,
    ProductShape,
    Shape,
    Storage,
    Trace,
    above,
)

try:
    import torch
except ImportError as error:
    raise OptionError("tracing a module needs PyTorch: pip install 'co2sim[torch]'") from error

from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import flop_registry

aten: Any = torch.ops.aten

Build = Callable[[], nn.Module]
Batch = Callable[[], Any]
Loss = Callable[[Any, Any], Tensor]


# --- the user's file -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Source:
    """What a file gives: how a module is built, its inputs, its loss (None: the usual one).

    `tp_plan` says how ranks divide it (None: as the module says).
    """

    build: Build
    batch: Batch
    loss: Loss | None = None
    tp_plan: Mapping[str, Any] | None = None


def load_build(named: str) -> Source:
    """The functions of a file, by "my_model.py:build"; without a name it is `build`.

    Of the same file are `batch()`, the inputs, `loss(model, batch)`, a scalar, and `tp_plan`; the
    latter two may be missing. Executes the file. Raises OptionError for what is not there.
    """
    path, _, name = named.rpartition(":") if ".py:" in named else (named, "", "build")
    if not is_regular(Path(path)):
        raise OptionError(f"{given(path)} is not a file; name one such as my_model.py:build")
    module = _executed(Path(path))
    build = getattr(module, name or "build", None)
    if not callable(build):
        raise OptionError(f"{path} has no function {name}(); it must return the torch module")
    batch = getattr(module, "batch", None)
    if not callable(batch):
        raise OptionError(
            f"{path} has no function batch(); it must return the inputs of one step, such as"
            " torch.randint(0, 50257, (8, 1024))"
        )
    return Source(build, batch, getattr(module, "loss", None), getattr(module, "tp_plan", None))


def load_config(text: str, tokens: Callable[[int], int]) -> Source:
    """The class of transformers that the text of a `config.json` names, and one sample for it.

    `tokens` are those of a sequence for a number of parameters. Raises OptionError for what
    transformers does not know, or needs other inputs than tokens or an image.
    """
    transformers: Any = import_module("transformers")
    values = json.loads(text)
    with _refusing("the configuration"):
        config = transformers.AutoConfig.for_model(**values)
    named = (getattr(transformers, str(name), None) for name in config.architectures or ())
    kind = next((model_class for model_class in named if model_class), None)
    config.use_cache = False
    size = 0

    def build() -> nn.Module:
        nonlocal size
        make = kind._from_config if kind else transformers.AutoModelForCausalLM.from_config
        model: nn.Module = make(config, dtype=torch.bfloat16)
        size = sum(x.numel() for x in model.parameters())
        return model

    def batch() -> dict[str, Tensor]:
        if hasattr(config, "image_size"):
            side = (1, config.num_channels, *_sides(config.image_size))
            image = torch.zeros(side, dtype=torch.bfloat16)
            return {"pixel_values": image, "labels": torch.zeros(1, dtype=torch.int64)}
        longest = getattr(config, "max_position_embeddings", None) or tokens(size)
        ids = torch.zeros((1, min(longest, tokens(size))), dtype=torch.int64)
        return {"input_ids": ids, "labels": ids}

    return Source(build, batch)


def _sides(size: int | list[int]) -> list[int]:
    return [size, size] if isinstance(size, int) else size


def _executed(path: Path) -> ModuleType:
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise OptionError(f"{given(str(path))} is not a Python file")
    module = module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _refusal("the file", error) from error
    finally:
        sys.path.pop(0)
    return module


# --- kernels of a GPU, in the place of those of the CPU -------------------------------------------


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - the signature of PyTorch
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel that CUDA chooses: flash, else memory-efficient, else plain products.

    Source: PyTorch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, the default order.
    """
    size, same = query.size(-1), query.size(-1) == value.size(-1)
    half = query.dtype in {torch.float16, torch.bfloat16}
    four = query.dim() == key.dim() == value.dim() == 4  # noqa: PLR2004
    grouped = enable_gqa and query.size(-3) != key.size(-3)
    if four and attn_mask is None and half and same and size <= _FLASH_DIM:
        outputs = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
    elif not four or grouped or not (half or query.dtype == torch.float32):
        outputs = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale,
            enable_gqa=enable_gqa,
        )  # fmt: skip
    else:
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                no = torch.full((), float("-inf"), dtype=query.dtype)
                attn_mask = torch.where(attn_mask, torch.zeros((), dtype=query.dtype), no)
            attn_mask = attn_mask.expand(*query.shape[:-1], key.size(-2))
        needs = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        outputs = aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, needs, dropout_p, is_causal, scale=scale
        )
    out: Tensor = outputs[0]
    return out


_FLASH_DIM = 256
"""The widest head of the flash kernel."""


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:  # noqa: FBT001
    if not train or p == 0:
        return x
    out: Tensor = aten.native_dropout(x, p, train)[0]
    return out


_OWN = torch.library.Library("co2sim", "DEF")
_OWN.define("rms_norm(Tensor x, Tensor? weight, int dims) -> (Tensor, Tensor)")
_OWN.define("rms_norm_backward(Tensor g, Tensor x, Tensor s, Tensor? w) -> (Tensor, Tensor?)")
_own: Any = torch.ops.co2sim


@torch.library.register_fake("co2sim::rms_norm", lib=_OWN)
def _(x: Tensor, _weight: Tensor | None, dims: int) -> tuple[Tensor, Tensor]:
    scales = [*x.shape[: x.dim() - dims], *[1] * dims]
    return torch.empty_like(x), x.new_empty(scales, dtype=torch.float32)


@torch.library.register_fake("co2sim::rms_norm_backward", lib=_OWN)
def _(_g: Tensor, x: Tensor, _s: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return torch.empty_like(x), None if w is None else torch.empty_like(w)


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0], output[1], inputs[1])


def _norm_gradients(ctx: Any, gradient: Tensor, _scales: Tensor) -> tuple[Any, ...]:
    return (*_own.rms_norm_backward(gradient, *ctx.saved_tensors), None)


torch.library.register_autograd(
    "co2sim::rms_norm", _norm_gradients, setup_context=_keep_norm, lib=_OWN
)


def _rms_norm(
    x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """One kernel, as `_fused_rms_norm` is on CUDA."""
    del eps
    out: Tensor = _own.rms_norm(x, weight, len(shape))[0]
    return out


_SINGLE = (
    *("layer_norm", "group_norm", "softmax.int", "log_softmax.int", "cross_entropy_loss"),
    *("nll_loss", "nll_loss_nd", "mse_loss", "l1_loss", "smooth_l1_loss", "kl_div", "exp", "log"),
    *("log2", "log10", "log1p", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "rsqrt", "reciprocal"),
    *("sum", "sum.dim_IntList", "prod", "cumsum", "cumprod", "softplus", "cosine_similarity"),
    *("norm.Scalar", "norm.ScalarOpt_dim", "binary_cross_entropy_with_logits", "cdist", "renorm"),
)
"""Kernels that autocast runs in float32 on CUDA.

Source: PyTorch 2.13, docs/source/amp.md, CUDA ops that can autocast to float32. CUDA reads 16 bits
in `sum`, `prod`, `cumsum` and the softmaxes; here there is a copy before these.
"""


def _in_single(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(aten, packet), overload or "default")
    without = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(without):
            cast = tree_map_only(Tensor, lambda x: x.float() if x.is_floating_point() else x, args)
            return op(*cast, **kwargs)

    return run


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


class _NoCuda(TorchFunctionMode):
    """Tensors that are asked for on a GPU are made here, and those that go there stay."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # the signature of PyTorch
        if func is Tensor.cuda:
            return args[0]
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if func is Tensor.to and any(map(_is_cuda, args)):
            args = tuple(torch.device("cpu") if _is_cuda(x) else x for x in args)
        return func(*args, **(kwargs or {}))


def _uncompiled(model: Any = None, **_options: Any) -> Any:
    """`torch.compile` that changes nothing: kernels are traced as eager PyTorch issues them."""
    return model if model is not None else lambda function: function


class _Never:
    """A class that nothing is of."""


def _undrawn(tensor: Tensor, *_args: Any, **_options: Any) -> Tensor:
    return tensor


def _overwrite(parameter: Tensor, converted: Tensor) -> None:
    """Give a parameter another type: PyTorch cannot swap fake tensors, as references are kept."""
    parameter.data = converted.detach()
    parameter.__dict__["_known"] = converted.__dict__.get("_known")


@contextmanager
def _as_on_gpu() -> Iterator[None]:
    """Kernels and types of CUDA, for tensors of the CPU."""
    autocast = torch.amp.autocast_mode.autocast
    original = autocast.__init__

    def cast(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        original(self, device_type, dtype, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # that a kernel of the CPU is replaced
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
        library.impl("dropout", _dropout, "AutogradCPU")
        library.impl("rms_norm", _rms_norm, "AutogradCPU")
        for name in _SINGLE:
            library.impl(name, _in_single(name), "AutocastCPU")
        stack.enter_context(mock.patch.object(autocast, "__init__", cast))
        stack.enter_context(mock.patch.object(torch, "compile", _uncompiled))
        # It draws again until all values are within its bounds.
        stack.enter_context(mock.patch.object(nn.init, "_no_grad_trunc_normal_", _undrawn))
        # Libraries ask by this name whether they are exported, and leave shortcuts out then.
        stack.enter_context(mock.patch.object(torch._subclasses, "FakeTensor", _Never))
        stack.enter_context(mock.patch.object(torch.utils, "swap_tensors", _overwrite))
        stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(False)  # one kernel for an LSTM: its FLOP are not counted
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_NoCuda())
        yield


# --- values that are known without data -----------------------------------------------------------

_MOST_NUMBERS, _MOST_WHOLE = 1 << 16, 1 << 24
"""Elements of a tensor whose values are computed: floating point, and whole numbers."""
_CHOICES = {
    **dict.fromkeys(("topk", "sort", "max", "min"), 1),
    **dict.fromkeys(("argsort", "argmax", "argmin", "multinomial"), 0),
}
"""Kernels that choose by values, with the place of the choices among their outputs."""
_SHAPED = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
"""Kernels whose values do not depend on those of their tensor."""
_UNKNOWN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_BY_MASK = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class _UnknownValueError(Exception):
    """A number or a shape that depends on values which no tensor has here."""


class _Values:
    """Values of small tensors, computed beside their shapes from those that are known.

    A constructor may read a table that it has written, and a model the positions of its tokens.
    What depends on parameters or activations is unknown, but for the choices of a router: these
    are assumed to be even, which gives every expert its share of the tokens.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.assumed: Counter[str] = Counter()

    def of(self, x: Tensor) -> Tensor | None:
        """The values of a tensor; None: they are unknown."""
        if not isinstance(x, FakeTensor):
            return x.detach() if x.numel() <= _most(x) else None
        values: Tensor | None = x.__dict__.get("_known")
        if values is None and x.constant is not None:
            return x.constant
        return None if values is None or hasattr(values.untyped_storage(), "spoiled") else values

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The outputs of a kernel with their values; None: they are unknown."""
        name = func._schema.name.partition("::")[2]
        if name in _UNKNOWN:
            return None
        shaped = name in _SHAPED
        missing = False

        def real(x: Tensor) -> Tensor:
            nonlocal missing
            value = self.of(x)
            if value is None and shaped and x.numel() <= _most(x):
                return torch.empty(x.shape, dtype=x.dtype)
            missing = missing or value is None
            return x if value is None else value

        with _disable_current_modes():
            args, kwargs = tree_map_only(Tensor, real, (args, kwargs))
            return None if missing else func(*args, **kwargs)

    def attach(self, outputs: Any, values: Any) -> None:
        for x, value in zip(_tensors(outputs), _tensors(values), strict=True):
            x.__dict__["_known"] = value

    def fake(self, values: Any) -> Any:
        """Fake tensors of the shapes of values, with these."""

        def made(value: Tensor) -> Tensor:
            with self.mode:
                x = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            x.__dict__["_known"] = value
            return x

        return tree_map_only(Tensor, made, values)

    def spoil(self, func: Any, args: Any) -> None:
        """Forget what a kernel overwrites with unknown values."""
        for argument, x in zip(func._schema.arguments, args, strict=False):
            if argument.is_write and isinstance(x, FakeTensor) and "_known" in x.__dict__:
                x.__dict__["_known"].untyped_storage().spoiled = True

    def choose(self, name: str, func: Any, args: Any, kwargs: Any, outputs: Any) -> bool:
        """Give the choices of a kernel even values. Returns whether it makes choices."""
        outs = _tensors(outputs)
        position = _CHOICES.get(name, len(outs))
        if position >= len(outs) or not args[0].dim():
            return False
        chosen = outs[position]
        named = zip((argument.name for argument in func._schema.arguments), args, strict=False)
        dim = {**dict(named), **kwargs}.get("dim", -1)
        if dim is None or chosen.numel() > _MOST_WHOLE:
            return False
        options, moved = args[0].shape[dim], list(chosen.shape)
        if keeps := chosen.dim() == args[0].dim():
            moved.append(moved.pop(dim))
        with _disable_current_modes():
            even = (torch.arange(prod(moved)) % options).reshape(moved)
            chosen.__dict__["_known"] = (even.movedim(-1, dim) if keeps else even).contiguous()
        return True


def _most(x: Tensor) -> int:
    return _MOST_NUMBERS if x.is_floating_point() or x.is_complex() else _MOST_WHOLE


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [x for x in tree_iter(tree) if isinstance(x, Tensor)]


# --- kernels --------------------------------------------------------------------------------------

_FREE = {
    *("device", "detach", "lift_fresh", "scalar_tensor", "_local_scalar_dense", "item", "alias"),
    *_UNKNOWN,
}
"""Operations without a kernel on a GPU, beside views."""
_LOOKUPS = {"embedding", "index", "index_select", "gather", "take", "_unsafe_index"}
"""Kernels that read only as much of their first tensor as they write."""
_WRITES_ONLY = {"fill_", "zero_", "copy_", "uniform_", "normal_", "bernoulli_", *_SHAPED}
"""Kernels that do not read their first tensor."""
_SCATTERS = {
    "index_add_",
    "index_put_",
    "_index_put_impl_",
    "index_copy_",
    "scatter_",
    "scatter_add_",
}
"""Kernels that change only as much of their first tensor as the last one has."""
_ATTENTION = "_scaled_dot_product_"
MOST_KERNELS = 50_000
"""Of a step: more would be a loop over tokens, and take more than half a minute to trace. The graph
of 100,000 is freed by a recursion that is too deep."""
_COMPLEX = 4
"""Real products for a product of two complex numbers."""


def _held(x: Tensor) -> int:
    """Bytes of the elements of a tensor, those of an expanded dimension once."""
    shape, strides = x.shape, x.stride()
    if 0 in strides:
        count = prod(n for n, stride in zip(shape, strides, strict=True) if stride)
        return count * x.element_size()
    return x.numel() * x.element_size()


def _flop(func: Any, args: Any, kwargs: Any, out: Any, shape: Shape | None) -> int:
    """FLOP by PyTorch's counter, and by shape where it has none.

    It counts the gradients of a grouped convolution as if there were one group (PyTorch 2.13,
    conv_backward_flop).
    """
    if isinstance(shape, ConvolutionShape):
        count = sum(product.flop for product in shape.products())
    elif isinstance(shape, ProductShape):
        count = shape.flop
    else:
        rule = flop_registry.get(func._overloadpacket)
        count = int(rule(*args, **kwargs, out_val=out)) if rule else 0
    return count * (_COMPLEX if count and _tensors(out)[0].is_complex() else 1)


def _grouped(left: Tensor, right: Tensor) -> ProductShape:
    """A grouped product; without a third dimension on both sides the inner one is split."""
    (*_, rows, inner), columns = left.shape, right.shape[-1]
    if left.dim() == right.dim() == 2:  # noqa: PLR2004
        return ProductShape(rows, inner, columns, ragged="inner")
    groups = (right if right.dim() > left.dim() else left).shape[0]
    if left.dim() == right.dim():
        return ProductShape(rows, inner, columns, groups)
    return ProductShape(rows, inner, columns, groups=groups, ragged="rows")


def _convolution(name: str, ins: list[Tensor], args: Any, out: Any) -> ConvolutionShape:
    back = name == "convolution_backward"
    x, weight = (ins[1], ins[2]) if back else (ins[0], ins[1])
    stride, _, dilation, transposed, _, groups = args[4:10] if back else args[3:9]
    outputs = (ins[0] if back else out).shape
    made = weight.shape[1] * groups if transposed else weight.shape[0]
    names: tuple[Literal["input", "weight"], ...] = ("input", "weight")
    wanted = args[10] if back else (False, False)
    return ConvolutionShape(
        batch=x.shape[0],
        channels=(x.shape[1], made),
        groups=groups,
        inputs=tuple(x.shape[2:]),
        kernel=tuple(weight.shape[2:]),
        outputs=tuple(outputs[2:]),
        stride=tuple(stride),
        dilation=tuple(dilation),
        transposed=transposed,
        gradients=tuple(n for n, wants in zip(names, wanted, strict=False) if wants),
    )


def _attention_shape(name: str, ins: list[Tensor], args: Any, kwargs: Any) -> AttentionShape:
    back = name.endswith("_backward")
    query, key, value = ins[1:4] if back else ins[:3]
    flash, masked = "flash" in name, False
    if flash:
        causal = args[11 if back else 4] if len(args) > (11 if back else 4) else False
    else:
        masked = args[4 if back else 3] is not None
        position = 11 if back and "efficient" in name else 6
        causal = args[position] if len(args) > position else kwargs.get("is_causal", False)
    batch, heads, queries, size = query.shape
    return AttentionShape(
        batch, heads, key.shape[1], queries, key.shape[2], size, value.shape[3],
        causal=bool(causal), masked=masked,
    )  # fmt: skip


# --- what runs ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Memory:
    """A storage while it is traced."""

    size: int
    kind: Kind
    born: int
    died: int | None = None
    kept_by: str | None = None
    weight: bool = False


class _Recorder(TorchDispatchMode):
    """Every kernel, with the module that it belongs to, and every storage."""

    def __init__(self, values: _Values, places: "_Places") -> None:
        super().__init__()
        self.values = values
        self.places = places
        self.on = False
        self.views = 0
        self.kernels: list[Kernel] = []
        self.memory: list[_Memory] = []
        self._ids: dict[int, int] = {}
        self._refs: dict[int, Any] = {}

    def storage(self, x: Tensor, kind: Kind = "activation") -> int:
        """The number of the storage of a tensor."""
        storage = x.untyped_storage()
        key = storage._cdata
        index = self._ids.get(key)
        if index is None:
            index = self._ids[key] = len(self.memory)
            self.memory.append(_Memory(storage.nbytes(), kind, len(self.kernels)))

            def gone(_: Any, key: int = key, index: int = index) -> None:
                if self._ids.get(key) == index:
                    del self._ids[key], self._refs[key]
                self.memory[index].died = len(self.kernels)

            self._refs[key] = ref(storage, gone)
        return index

    def keep(self, x: Tensor) -> Tensor:
        """A tensor that is saved for the backward pass."""
        memory = self.memory[self.storage(x)]
        if memory.kept_by is None:
            memory.kept_by = self.places.now
        # The output of a node must not hold the node.
        return x if x.grad_fn is None else x.detach()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # the signature of PyTorch
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        out = self._run(func, name, args, kwargs)
        if self.on:
            self._record(func, name, args, kwargs, out)
        return out

    def _run(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        values = self.values
        if name == "_local_scalar_dense":
            scalar = values.of(args[0])
            if scalar is None:
                raise _UnknownValueError
            with _disable_current_modes():
                return scalar.item()
        if name in _BY_MASK:
            args = self._indices(args)
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            scalar = values.compute(func, args, kwargs)
            if scalar is None:
                raise _UnknownValueError from error
            return values.fake(scalar)
        outs = _tensors(out)
        if outs and not self.places.backward and all(x.numel() <= _most(x) for x in outs):
            scalar = values.compute(func, args, kwargs)
            if scalar is not None:
                values.attach(out, scalar)
                return out
            if values.choose(name, func, args, kwargs, out):
                values.assumed[self.places.now] += 1
        if func._schema.is_mutable:
            values.spoil(func, args)
        return out

    def _indices(self, args: Any) -> Any:
        """Masks as places: the number of these is known only from values."""
        places: list[Any] = []
        for x in args[1]:
            if x is not None and x.dtype in {torch.bool, torch.uint8}:
                mask = self.values.of(x)
                if mask is None:
                    raise _UnknownValueError
                with _disable_current_modes():
                    indices = list(mask.nonzero().unbind(1))
                places.extend(self.values.fake(indices))
            else:
                places.append(x)
        return (args[0], places, *args[2:])

    def _record(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        ins, outs = _tensors((args, kwargs)), _tensors(out)
        read = [self.storage(x) for x in ins]
        written = [self.storage(x) for x in outs]
        if name in _FREE or not outs:
            return
        if not func._schema.is_mutable and all(storage in read for storage in written):
            self.views += 1
            return
        sizes, made = [_held(x) for x in ins], [_held(x) for x in outs]
        if name in _LOOKUPS:
            sizes[0] = min(sizes[0], made[0])
        elif name in _SCATTERS:
            made[0] = sizes[0] = min(sizes[0], sizes[-1])
        elif name in _WRITES_ONLY and ins:
            sizes[0] = 0
        if name in {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}:
            shape: Shape | None = self._product(name, ins, read)
        elif name in {"convolution", "convolution_backward"}:
            shape = _convolution(name, ins, args, out)
        elif name.startswith(_ATTENTION):
            shape = _attention_shape(name, ins, args, kwargs)
        else:
            shape = None
        if len(self.kernels) == MOST_KERNELS:
            raise OptionError(
                f"the step has more than {MOST_KERNELS:,} kernels in module"
                f" {given(self.places.now)}: give batch() shorter sequences, or fewer samples"
            )
        self._follow_weights(name, read, written)
        module, phase = self.places.of_kernel()
        first = outs[0]
        self.kernels.append(
            Kernel(
                name=name,
                module=module,
                phase=phase,
                flop=_flop(func, args, kwargs, out, shape),
                reads=tuple(
                    Access(storage, n) for storage, n in zip(read, sizes, strict=True) if n
                ),
                writes=tuple(
                    Access(storage, n) for storage, n in zip(written, made, strict=True) if n
                ),
                dtype=str(first.dtype).removeprefix("torch."),
                width=first.element_size(),
                shape=shape,
                views=self.views,
            )
        )
        self.views = 0

    def _follow_weights(self, name: str, read: list[int], written: list[int]) -> None:
        """A copy of a parameter in another type, or by rows, stands for it in products."""
        if name in {"_to_copy", "clone"} and self.memory[read[0]].weight:
            self.memory[written[0]].weight = True

    def _product(self, name: str, ins: list[Tensor], read: list[int]) -> ProductShape:
        first = 1 if name in {"addmm", "baddbmm"} else 0
        left, right = ins[first], ins[first + 1]
        weights = [self.memory[storage].weight for storage in read[first : first + 2]]
        side: Any = "right" if weights[1] else "left" if weights[0] else ""
        if name == "_grouped_mm":
            shape = _grouped(left, right)
            if shape.ragged == "inner":
                shape = replace(shape, groups=ins[2].numel())
            return replace(shape, parameter=side)
        batch = left.shape[0] if left.dim() == 3 else 1  # noqa: PLR2004
        rows, inner = left.shape[-2:]
        return ProductShape(rows, inner, right.shape[-1], batch, side)


# --- where it runs --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Visit:
    """What a module was given and has returned, of all its calls."""

    calls: int = 0
    received: int = 0
    returned: int = 0


class _Places:
    """The module whose kernels run: by its hooks forward, by the numbers of autograd backward.

    Autograd counts its nodes as they are made. The node of a backward kernel was made by the
    module that was open at its number.
    """

    def __init__(self) -> None:
        self.stack = [""]
        self.marks: list[int] = [0]
        self.names: list[str] = [""]
        self.visits: dict[str, _Visit] = {}
        self.owners: dict[int, str] = {}
        self.last = False
        """Whether it is the backward pass."""

    @property
    def now(self) -> str:
        return self.stack[-1]

    @property
    def backward(self) -> bool:
        return len(self.stack) == 1 and torch._C._current_autograd_node() is not None

    def watch(self, model: nn.Module) -> list[Any]:
        """Hooks of every module; returns what removes them."""
        handles: list[Any] = []
        for path, module in model.named_modules():
            handles += [
                module.register_forward_pre_hook(self._enter(path), with_kwargs=True),
                module.register_forward_hook(self._leave(), always_call=True),
            ]
            for parameter in module.parameters(recurse=False):
                self.owners.setdefault(id(parameter), path)
        return handles

    def _enter(self, path: str) -> Callable[..., None]:
        def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
            visit = self.visits.setdefault(path, _Visit())
            visit.calls += 1
            visit.received += sum(map(_held, _tensors((args, kwargs))))
            self.stack.append(path)
            self._mark()

        return enter

    def _leave(self) -> Callable[..., None]:
        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            self.visits[self.now].returned += sum(map(_held, _tensors(output)))
            self.stack.pop()
            self._mark()

        return leave

    def _mark(self) -> None:
        self.marks.append(torch._C._autograd._get_sequence_nr())
        self.names.append(self.now)

    def of_kernel(self) -> tuple[str, Phase]:
        node = torch._C._current_autograd_node()
        if node is None:
            return self.now, "forward"
        if len(self.stack) > 1:
            return self.now, "recomputation"
        if not self.last:
            raise OptionError(
                "the loss computes gradients itself (torch.autograd.grad), whose own gradients are"
                " not counted; leave that term out"
            )
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self.owners.get(id(variable), ""), "backward"
        return self.names[bisect_right(self.marks, node._sequence_nr()) - 1], "backward"


# --- the whole ------------------------------------------------------------------------------------


def trace(
    build: Build,
    batch: Batch,
    loss: Loss | None = None,
    tp_plan: Mapping[str, Any] | None = None,
) -> Trace:
    """What a forward and a backward pass of `build()` on `batch()` execute and keep.

    `loss(model, batch)` gives a scalar; None: `.loss` of what the module returns, else the mean of
    its first tensor. `tp_plan` gives modules that ranks divide; None: the `tp_plan` of the module,
    if it has one. Raises OptionError, in one line, for what cannot be traced.
    """
    began = time.perf_counter()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    places = _Places()
    values = _Values(mode)
    recorder = _Recorder(values, places)
    with _quiet(), _as_on_gpu(), mode, recorder:
        model = _built(build)
        inputs = _given(batch, mode)
        of = loss or _usual_loss
        parameters = _own_storages(model, inputs, recorder)
        handles = places.watch(model)
        try:
            _step(model, inputs, of, recorder)
        finally:
            for handle in handles:
                handle.remove()
        gradients = [x.grad for x in model.parameters() if x.grad is not None]
        for gradient in gradients:
            recorder.memory[recorder.storage(gradient)].kind = "gradient"
        samples, units = _size(inputs)
        modules = _modules(model, parameters, recorder)
    end = len(recorder.kernels)
    return Trace(
        kernels=tuple(recorder.kernels),
        storages=tuple(
            Storage(x.size, x.kind, x.born, end if x.died is None else x.died, x.kept_by)
            for x in recorder.memory
        ),
        parameters=parameters,
        modules=modules,
        samples=samples,
        units=units,
        assumptions=_assumptions(model, values),
        seconds=time.perf_counter() - began,
        plan=plan_of(_own_plan(model) if tp_plan is None else tp_plan),
        own_plan=tp_plan is None,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the log of fake tensors, which repeats each error that is raised anyhow."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


def _built(build: Build) -> nn.Module:
    with _refusing("build()"):
        model = build()
    if not isinstance(model, nn.Module):
        raise OptionError(f"build() returned {given(model)}; it must be a torch.nn.Module")
    if any(isinstance(x, torch.jit.ScriptModule) for x in model.modules()):
        raise OptionError("a module of TorchScript cannot be traced: build it without torch.jit")
    made: dict[int, Tensor] = {}

    def fake(x: Tensor) -> Tensor:
        """A tensor that was made before; shared ones stay shared."""
        if id(x) not in made:
            with _disable_current_modes():
                shape = x.detach().to("meta")
            new = torch.empty_strided(shape.shape, shape.stride(), dtype=x.dtype)
            made[id(x)] = nn.Parameter(new, x.requires_grad) if isinstance(x, nn.Parameter) else new
        return made[id(x)]

    for module in model.modules():
        for kept in (module._parameters, module._buffers):
            for name, x in kept.items():
                if x is not None and not isinstance(x, FakeTensor):
                    kept[name] = fake(x)  # type: ignore[assignment]
    return model


def _given(batch: Batch, mode: FakeTensorMode) -> Any:
    with _refusing("batch()"):
        inputs = batch()

    def fake(x: Tensor) -> Tensor:
        if isinstance(x, FakeTensor):
            return x
        new = mode.from_tensor(x)
        if x.numel() <= _most(x):
            new.__dict__["_known"] = x.detach()
        return new

    tensors = _tensors(inputs)
    if not tensors:
        raise OptionError(f"batch() returned {given(inputs)}; it must hold the input tensors")
    for x in tensors:
        if x.layout is not torch.strided or x.is_nested:
            raise OptionError("batch() returned a sparse or nested tensor; give plain ones")
        if not x.numel():
            raise OptionError(f"batch() returned {_described(x)}; no size may be 0")
    return tree_map_only(Tensor, fake, inputs)


def _usual_loss(model: Any, inputs: Any) -> Tensor:
    """The loss of what a module returns, else the mean of its first tensor."""
    if isinstance(inputs, Mapping):
        out = model(**inputs)
    elif isinstance(inputs, tuple | list):
        out = model(*inputs)
    else:
        out = model(inputs)
    value = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if isinstance(value, Tensor):
        return value
    floating = [x for x in _tensors_of(out) if x.is_floating_point() or x.is_complex()]
    first = next((x for x in floating if x.requires_grad), None)
    if first is None:
        raise OptionError(
            f"the module returned {given(_described(out))} without a loss or a tensor that depends"
            " on a parameter that is trained: set requires_grad, or give loss(model, batch)"
        )
    return (first.abs() if first.is_complex() else first).float().mean()


def _tensors_of(out: Any) -> list[Tensor]:
    """The tensors of an output, those of the fields of an object too."""
    return _tensors(out) or _tensors(list(vars(out).values()) if hasattr(out, "__dict__") else [])


def _own_storages(model: nn.Module, inputs: Any, recorder: _Recorder) -> tuple[Parameter, ...]:
    """The parameters of a model, whose storages are no activations; nor are those of inputs."""
    paths: dict[int, list[str]] = {}
    by: dict[int, nn.Parameter] = {}
    for path, x in model.named_parameters(remove_duplicate=False):
        paths.setdefault(id(x), []).append(path)
        by[id(x)] = x
    for x in by.values():
        recorder.memory[recorder.storage(x, "parameter")].weight = True
    for buffer in model.buffers():
        recorder.storage(buffer, "buffer")
    for tensor in _tensors(inputs):
        recorder.storage(tensor, "input")
    return tuple(
        Parameter(
            path=paths[key][0],
            shape=tuple(x.shape),
            dtype=str(x.dtype).removeprefix("torch."),
            width=x.element_size(),
            trainable=x.requires_grad,
            storage=recorder.storage(x),
            aliases=tuple(paths[key][1:]),
        )
        for key, x in by.items()
    )


def _step(model: nn.Module, inputs: Any, loss: Loss, recorder: _Recorder) -> None:
    hooks = torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda x: x)
    recorder.on = True
    try:
        with _refusing("the forward pass", recorder.places):
            with hooks:
                value = loss(model, inputs)
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise OptionError(
                    f"loss(model, batch) returned {given(_described(value))}; it must be a scalar"
                )
            if not value.requires_grad:
                raise OptionError(
                    "the loss depends on no parameter that is trained: set requires_grad, and do"
                    " not compute it under torch.no_grad()"
                )
        recorder.places.stack, recorder.places.last = [""], True
        with _refusing("the backward pass", recorder.places):
            value.backward()
    finally:
        recorder.on = False


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__


def _size(inputs: Any) -> tuple[int, int]:
    """Samples of a batch, and tokens where it is made of whole numbers."""
    first = next((x for x in _tensors(inputs) if x.dim()), None)
    if first is None:
        return 1, 1
    tokens = first.dim() > 1 and not first.is_floating_point() and not first.is_complex()
    return first.shape[0], prod(first.shape[:2]) if tokens else first.shape[0]


def _modules(
    model: nn.Module, parameters: tuple[Parameter, ...], recorder: _Recorder
) -> tuple[Module, ...]:
    """The tree of modules, with a number for those that are alike."""
    parts: dict[str, list[Any]] = {path: [] for path, _ in model.named_modules()}
    cores: dict[Any, int] = {}
    for kernel in recorder.kernels:
        sizes = [tuple(x.size for x in side) for side in (kernel.reads, kernel.writes)]
        key = (kernel.name, kernel.phase, kernel.flop, kernel.shape, kernel.dtype, *sizes)
        core = cores.setdefault(key, len(cores))
        for path in above(kernel.module):
            parts[path].append((kernel.module[len(path) :], core))
    for parameter in parameters:
        for path in above(parameter.path.rpartition(".")[0]):
            shape = (parameter.path[len(path) :], parameter.shape, parameter.dtype)
            parts[path].append((*shape, parameter.trainable))
    numbers: dict[Any, int] = {}
    modules = []
    for path, module in model.named_modules():
        kind = type(module).__qualname__
        visit = recorder.places.visits.get(path, _Visit())
        modules.append(
            Module(
                path=path,
                kind=kind,
                calls=visit.calls,
                received=visit.received,
                returned=visit.returned,
                buffers=sum(map(_held, module.buffers(recurse=False))),
                alike=numbers.setdefault((kind, *parts[path]), len(numbers)),
            )
        )
    return tuple(modules)


def _own_plan(model: nn.Module) -> Mapping[str, Any]:
    plan = getattr(model, "tp_plan", None)
    return plan if isinstance(plan, Mapping) else {}


def _assumptions(model: nn.Module, values: _Values) -> tuple[str, ...]:
    lines = [
        f"the choices of {path or 'the model'} are even: they depend on data"
        for path in values.assumed
    ]
    if not model.training:
        lines.append("the module is in eval mode: no dropout, and norms by stored statistics")
    return tuple(lines)


# --- what cannot be traced ------------------------------------------------------------------------


@contextmanager
def _refusing(what: str, places: _Places | None = None) -> Iterator[None]:
    """Any error of the user's code as one line, with its place and what to do."""
    try:
        yield
    except OptionError:
        raise
    except (Exception, SystemExit) as error:
        raise _refusal(what, error, places) from error


def _refusal(
    what: str, error: Exception | SystemExit, places: _Places | None = None
) -> OptionError:
    module = f" in module {places.now}" if places and places.now else ""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno))
    own = [(name, line) for name, line in frames if not _of_others(name)]
    where = f" at {Path(own[-1][0]).name}:{own[-1][1]}" if own else ""
    if isinstance(error, _UnknownValueError):
        line = (
            f"{what}{module}{where} depends on values that are not known without data (a branch,"
            " .item(), nonzero() or a mask of activations): compute with fixed shapes, such as"
            " torch.where, or take the numbers from batch()"
        )
    else:
        text = " ".join(str(error).split()) or type(error).__name__
        line = f"{what}{module}{where} failed: {cut(text, 160)}{_advice(error, text)}"
    return OptionError(line)


def _of_others(file: str) -> bool:
    """Whether a file is of Python, of a package, or of co2sim: not the user's."""
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    return file.startswith(("<", *libraries)) or "site-packages" in file or file == __file__


_ADVICE = {
    (
        "cuda",
        "gpu",
    ): "there is no GPU here: use the device of the inputs, and choose code by options",
    ("uninitializedparameter",): "lazy modules have no shapes yet: give them the sizes of inputs",
    ("numpy", "data_ptr", "data pointer"): "fake tensors have no memory: compute with torch, or"
    " outside of the module",
    ("inputs of bf16",): "a grouped product is in bfloat16: build the module in that",
    ("sparse",): "only plain tensors are traced: build without sparse gradients",
}
"""By words of an error."""


def _advice(error: Exception | SystemExit, text: str) -> str:
    if isinstance(error, ModuleNotFoundError):
        return "; install it, or build the module without it"
    if isinstance(error, UnsupportedOperatorException):
        return "; a custom kernel needs its shapes: torch.library.register_fake"
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "; make tensors within build(), where they take no memory"
    fitting = (line for words, line in _ADVICE.items() if any(w in text.lower() for w in words))
    return "".join(f"; {line}" for line in list(fitting)[:1])
