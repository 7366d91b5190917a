"""Networks, losses and an optimizer for `memory_oracle.py`: what they allocate and keep is theirs.

Tensors have no data. Where a CUDA kernel allocates less than what torch runs on a CPU, the CUDA
kernel is asked for by its name (attention), or written as its allocations (RMSNorm).
"""

# mypy: allow-untyped-calls
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional

FLASH = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001
"""What `scaled_dot_product_attention` chooses on CUDA for bf16 without a mask.

Gradients have the heads of their own inputs, and the log-sum-exp is kept in fp32."""

PATCH = 16
"""Pixels of a side of a ViT's patch."""


@dataclass(frozen=True)
class Shape:
    """A network. `family`: llama (causal), gpt2 (causal) or vit (an encoder of patches)."""

    family: str
    width: int
    heads: int
    kv_heads: int
    mlp: int
    layers: int
    vocabulary: int
    tokens: int
    norm: str = "fused"
    gqa: str = "repeat"


class _RMSNormKernel(torch.autograd.Function):
    """Allocations of CUDA's fused RMSNorm: the output, and 1 / RMS of each row in fp32.

    On a CPU torch runs eight operators instead, whose copies in fp32 are kept.
    Source: `_fused_rms_norm_cuda` in ATen/native/cuda/layer_norm_kernel.cu of PyTorch.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Output of the type of `x`."""
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of both."""
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class RMSNorm(nn.Module):
    """RMSNorm: `fused` as nn.RMSNorm runs on CUDA, `eager` as LlamaRMSNorm of transformers."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """Of the last dimension; in fp32 under autocast, as CUDA's list of operators says."""
        if self.kind == "eager":
            wide = x.to(torch.float32)
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            return self.weight * wide.to(x.dtype)
        if torch.is_autocast_enabled("cpu"):
            x = x.float()
        weight: Tensor = self.weight
        if isinstance(x, DTensor) and isinstance(weight, DTensor):  # sequence parallel
            weight = weight.to_local(grad_placements=[Partial()])
            local = _call(_RMSNormKernel, x.to_local(), weight)
            return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False)
        if isinstance(weight, DTensor):  # all ranks have all rows
            weight = weight.to_local()
        return _call(_RMSNormKernel, x, weight)


class LayerNorm(nn.LayerNorm):
    """LayerNorm in fp32 under autocast, as CUDA's list of operators says."""

    def forward(self, x: Tensor) -> Tensor:
        """Of the last dimension."""
        return super().forward(x.float() if torch.is_autocast_enabled("cpu") else x)


def _call(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    return cast("Tensor", function.apply(*arguments))


def _attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Attention of (samples, heads, tokens, dim); back as (samples, tokens, heads * dim)."""
    out = FLASH(q, k, v, 0.0, causal)[0]
    return cast("Tensor", out.transpose(1, 2).flatten(2))


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dim, self.repeat = shape.width // shape.heads, shape.gqa == "repeat"
        self.groups = shape.heads // shape.kv_heads
        self.q = nn.Linear(shape.width, shape.width, bias=False)
        self.k = nn.Linear(shape.width, shape.kv_heads * self.dim, bias=False)
        self.v = nn.Linear(shape.width, shape.kv_heads * self.dim, bias=False)
        self.o = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Heads are those of this rank."""
        q, k, v = (f(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for f in self.products())
        q, k = (_rotate(y, cos, sin).to(v.dtype) for y in (q, k))
        if self.repeat:  # as transformers' repeat_kv and torchtitan's
            k, v = (y.repeat_interleave(self.groups, 1) for y in (k, v))
        return cast("Tensor", self.o(_attention(q, k, v, causal=True)))

    def products(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        """What makes queries, keys and values."""
        return self.q, self.k, self.v


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Positions turned into `x`, as in transformers' `apply_rotary_pos_emb`."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class SwiGLU(nn.Module):
    """The MLP of a Llama."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.mlp, bias=False)
        self.up = nn.Linear(shape.width, shape.mlp, bias=False)
        self.down = nn.Linear(shape.mlp, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Down of silu(gate) times up."""
        return cast("Tensor", self.down(functional.silu(self.gate(x)) * self.up(x)))


class LlamaLayer(nn.Module):
    """A layer of a Llama."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = RMSNorm(shape.width, shape.norm)
        self.attention = LlamaAttention(shape)
        self.norm2 = RMSNorm(shape.width, shape.norm)
        self.mlp = SwiGLU(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The residual stream."""
        x = x + self.attention(self.norm1(x), cos, sin)
        return cast("Tensor", x + self.mlp(self.norm2(x)))


class BiasedAttention(nn.Module):
    """Attention of as many keys as queries, with biases and one product for all three."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dim, self.causal = shape.width // shape.heads, shape.family == "gpt2"
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.o = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Of all heads."""
        q, k, v = (
            y.unflatten(-1, (-1, self.dim)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)
        )
        return cast("Tensor", self.o(_attention(q, k, v, causal=self.causal)))


class BiasedLayer(nn.Module):
    """A layer of GPT-2 and of ViT: LayerNorm before, GELU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = LayerNorm(shape.width), LayerNorm(shape.width)
        self.attention = BiasedAttention(shape)
        self.up = nn.Linear(shape.width, shape.mlp)
        self.down = nn.Linear(shape.mlp, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream."""
        x = x + self.attention(self.norm1(x))
        return cast("Tensor", x + self.down(functional.gelu(self.up(self.norm2(x)))))


class Output(nn.Module):
    """The last norm and the head.

    They are one unit of FSDP in torchtitan, which shards the list of both. The tracker would run
    the hooks of a list for each of its modules, and so gather and reduce twice.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.width, shape.norm)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, x: Tensor, labels: Tensor | None) -> Tensor:
        """Logits; with `labels` the loss, in chunks."""
        return _head(self.head, self.norm(x), labels)


class Llama(nn.Module):
    """A Llama: RMSNorm, grouped-query attention, SwiGLU, a head of its own."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dim = shape.width // shape.heads
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(LlamaLayer(shape) for _ in range(shape.layers))
        self.output = Output(shape)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits; with `labels` the loss, in chunks."""
        x = self.embedding(ids)
        cos, sin = (x.new_empty((ids.shape[1], self.dim)) for _ in range(2))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return cast("Tensor", self.output(x, labels))


class GPT2(nn.Module):
    """A GPT-2: positions are learnt, and the head is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.tokens, shape.width)
        self.layers = nn.ModuleList(BiasedLayer(shape) for _ in range(shape.layers))
        self.norm = LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits; with `labels` the loss, in chunks."""
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return _head(self.head, self.norm(x), labels)


class ViT(nn.Module):
    """A ViT with patches of 16 x 16 pixels; the class is the mean of its tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, shape.width, PATCH, PATCH)
        self.positions = nn.Parameter(torch.zeros(shape.tokens, shape.width))
        self.layers = nn.ModuleList(BiasedLayer(shape) for _ in range(shape.layers))
        self.norm = LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary)

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits of the classes."""
        x = self.patches(pixels).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        return cast("Tensor", self.head(self.norm(x).mean(1)))


MODELS: dict[str, Callable[[Shape], nn.Module]] = {"llama": Llama, "gpt2": GPT2, "vit": ViT}


def _head(head: nn.Linear, x: Tensor, labels: Tensor | None) -> Tensor:
    if labels is None:
        return cast("Tensor", head(x))
    return _call(_ChunkedLoss, x.flatten(0, -2), head.weight, labels.flatten())


def eager_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of logits in fp32, as torchtitan and transformers have it."""
    return functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


def in_place_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in one kernel that writes the gradient over the logits."""
    return _call(_InPlaceLoss, logits.flatten(0, -2), labels.flatten()).mean()


class _InPlaceLoss(torch.autograd.Function):
    """Allocations of a kernel that overwrites logits with their gradient.

    Source: `LigerCrossEntropyFunction`, liger_kernel/ops/cross_entropy.py of Liger-Kernel.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        """Losses of the rows, in fp32."""
        ctx.save_for_backward(logits.detach())
        return torch.empty_like(labels, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[Tensor, None]:
        """What the forward pass wrote."""
        return ctx.saved_tensors[0], None


class _ChunkedLoss(torch.autograd.Function):
    """Head and cross-entropy together, a chunk of rows at a time; gradients come with the loss.

    Source: `fused_linear_cross_entropy_forward`, liger_kernel/ops/fused_linear_cross_entropy.py of
    Liger-Kernel: the size of a chunk, and gradients of the types of their tensors.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        rows, width = x.shape
        pieces = -(-weight.shape[0] // width)
        size = 1 << (-(-rows // pieces) - 1).bit_length()
        losses = torch.empty_like(labels, dtype=torch.float32)
        x_grad, weight_grad = torch.zeros_like(x), torch.zeros_like(weight)
        for start in range(0, rows, size):
            part = x[start : start + size]
            logits = part @ weight.t()  # the kernel writes the gradient over them
            x_grad[start : start + size] = logits @ weight
            torch.addmm(weight_grad, logits.t(), part, out=weight_grad)
        ctx.save_for_backward(x_grad, weight_grad)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """What the forward pass made."""
        return *ctx.saved_tensors, None


class AdamW8bit(torch.optim.Optimizer):
    """Allocations of AdamW with states of 8 bits: two of a byte, and a scale for 256 of them.

    Each parameter is one kernel, which allocates nothing.
    Source: blocks of 256 and scales in fp32, `Optimizer2State.init_state` of bitsandbytes.
    """

    BLOCK = 256

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Allocate the states, the first time."""
        del closure
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is None or self.state[parameter]:
                continue
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            scales = -(-local.numel() // self.BLOCK)
            self.state[parameter] = {
                name: torch.zeros(size, dtype=kind)
                for state in ("1", "2")
                for name, size, kind in (
                    ("state" + state, local.numel(), torch.uint8),
                    ("absmax" + state, scales, torch.float32),
                )
            }
