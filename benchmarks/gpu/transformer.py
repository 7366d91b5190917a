"""The transformers of the catalog as plain PyTorch modules, to time their kernels.

Each is what its `Transformer` in co2sim says: fused products for queries, keys and values, and for
the two inputs of a gated MLP; flash attention; rotary positions where there are no learned ones.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention, silu

FP8_TOP = 448.0
"""The largest number of float8_e4m3fn."""


class Fp8Product(torch.autograd.Function):
    """x w^T in fp8, each tensor with one scale; the gradients' products in bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Rows x [n, inner] times weight [columns, inner]."""
        ctx.save_for_backward(x, weight)
        left, right = as_fp8(x), as_fp8(weight)
        return torch._scaled_mm(  # noqa: SLF001 - torch has no public product in fp8
            left[0], right[0].t(), scale_a=left[1], scale_b=right[1], out_dtype=x.dtype
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Of the rows, and of the weight."""
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


def as_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor in fp8 and its scale."""
    scale = x.abs().amax().float().clamp(min=1e-12) / FP8_TOP
    return (x / scale).clamp(-FP8_TOP, FP8_TOP).to(torch.float8_e4m3fn), scale


class Product(nn.Linear):
    """A linear layer whose product may be in fp8."""

    fp8 = False

    def forward(self, x: Tensor) -> Tensor:
        """Rows of the last dimension."""
        if not self.fp8:
            return super().forward(x)
        made: Tensor = Fp8Product.apply(x.reshape(-1, x.shape[-1]), self.weight)
        return made.view(*x.shape[:-1], -1)


class Layer(nn.Module):
    """Attention and MLP behind norms, each added to what came in. `body` is the model's shape."""

    def __init__(self, body: dict[str, Any], *, rotary: bool) -> None:
        super().__init__()
        hidden, self.heads = body["hidden"], body["heads"]
        self.kv = body["kv_heads"] or self.heads
        self.width, self.rotary = body["head_dim"] or hidden // self.heads, rotary
        self.gated, bias = body["gated"], bool(body["bias"])
        norm = nn.LayerNorm if body["norm"] == "layernorm" else nn.RMSNorm
        self.before, self.between = norm(hidden), norm(hidden)
        q, kv, ffn = self.heads * self.width, self.kv * self.width, body["ffn"]
        self.qkv = Product(hidden, q + 2 * kv, bias=bias)
        self.out = Product(q, hidden, bias=bias)
        self.up = Product(hidden, ffn * (2 if self.gated else 1), bias=bias)
        self.down = Product(ffn, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Samples x tokens x hidden."""
        samples, tokens, _ = x.shape
        sizes = [self.heads * self.width, self.kv * self.width, self.kv * self.width]
        q, k, v = (
            one.view(samples, tokens, -1, self.width).transpose(1, 2)
            for one in self.qkv(self.before(x)).split(sizes, dim=-1)
        )
        if self.rotary:
            turn = _turns(tokens, self.width, x.device)
            q, k = _turned(q, turn), _turned(k, turn)
        mixed = scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.kv != self.heads
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, tokens, -1))
        inside = self.up(self.between(x))
        if self.gated:
            gate, value = inside.chunk(2, dim=-1)
            return x + self.down(silu(gate) * value)
        return x + self.down(gelu(inside, approximate="tanh"))


def _turns(tokens: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles, tokens x width / 2."""
    rates = 10_000 ** -(torch.arange(0, width, 2, device=device) / width)
    angles = torch.arange(tokens, device=device)[:, None] * rates
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (one.to(x.dtype) for one in turn)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class Decoder(nn.Module):
    """Embedding, layers, norm and head, with the mean cross entropy of the next token."""

    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        body, hidden = shape["body"], shape["body"]["hidden"]
        self.embedding = nn.Embedding(shape["vocab"], hidden)
        self.positions = nn.Embedding(shape["positions"], hidden) if shape["positions"] else None
        self.layers = nn.ModuleList(
            Layer(body, rotary=self.positions is None) for _ in range(body["layers"])
        )
        self.norm = (nn.LayerNorm if body["norm"] == "layernorm" else nn.RMSNorm)(hidden)
        self.head = nn.Linear(hidden, shape["vocab"], bias=False)
        if shape["tied"]:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, *, again: bool = False) -> Tensor:
        """The loss of samples x tokens; `again`: layers are computed again in the backward pass."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = (
                torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
                if again
                else layer(x)
            )
        logits = self.head(self.norm(x))
        return cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
