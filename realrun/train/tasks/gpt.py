"""A small transformer: pre-norm blocks, a head tied to the embedding.

A causal one learns its positions. One that looks both ways turns queries and keys by their places:
with learned positions it finds no neighbours for hundreds of steps.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from realrun.train.tasks.presets import VOCABULARY, GPTShape

_SPREAD = 0.02
"""Standard deviation of initial weights, as in GPT-2."""

_BASE = 100.0
"""Of the angles; 10,000 in the source, whose contexts are longer than these of 64 to 256."""


def turned(x: Tensor) -> Tensor:
    """Pairs of features of x [..., time, features], an even number, turned by angles of places.

    The product of two then depends on how far they are apart. Source: Su et al., RoFormer: Enhanced
    Transformer with Rotary Position Embedding, 2021, eq. 34.
    """
    time, features = x.shape[-2:]
    speeds = _BASE ** (-torch.arange(0, features, 2, device=x.device) / features)
    angles = torch.arange(time, device=x.device)[:, None] * speeds
    cosines, sines = angles.cos(), angles.sin()
    first, second = x[..., 0::2], x[..., 1::2]
    pair = (first * cosines - second * sines, first * sines + second * cosines)
    return torch.stack(pair, dim=-1).flatten(-2)


class Attention(nn.Module):
    """Self-attention: [batch, time, hidden] to the same."""

    def __init__(self, hidden: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.taken = nn.Linear(hidden, 3 * hidden, bias=False)
        self.given = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Every place looks at itself and at those before it; if not causal, at all."""
        batch, time, hidden = x.shape
        query, key, value = (
            part.view(batch, time, self.heads, -1).transpose(1, 2)
            for part in self.taken(x).split(hidden, dim=2)
        )
        if not self.causal:
            query, key = turned(query), turned(key)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        out: Tensor = self.given(mixed.transpose(1, 2).reshape(batch, time, hidden))
        return out


class Layer(nn.Module):
    """Attention and an MLP of four times the width, each with a norm before it and a residual."""

    def __init__(self, hidden: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, causal=causal)
        self.wide = nn.Linear(hidden, 4 * hidden, bias=False)
        self.narrow = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, hidden] to the same."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.narrow(functional.gelu(self.wide(self.norm2(x))))
        return out


class GPT(nn.Module):
    """Characters [batch, time] to logits [batch, time, vocabulary]; time is at most `context`.

    Not `causal`, it looks both ways, as BERT does.
    Weights come from torch's global generator. Source of the shape and the initial weights:
    Radford et al., Language Models are Unsupervised Multitask Learners, 2019 (GPT-2): N(0, 0.02),
    and the matrices that write to the shortcut scaled by 1 / sqrt(2 layers).
    """

    def __init__(
        self, shape: GPTShape, *, causal: bool = True, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.context, shape.hidden) if causal else None
        self.layers = nn.ModuleList(
            Layer(shape.hidden, shape.heads, causal=causal) for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(shape.hidden)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                written = name.endswith(("given.weight", "narrow.weight"))
                shrink = (2 * shape.layers) ** -0.5 if written else 1.0
                nn.init.normal_(weight, std=_SPREAD * shrink)

    def forward(self, characters: Tensor) -> Tensor:
        """Logits of the character that follows each; if not causal, of the one that is there."""
        x = self.embedding(characters)
        if self.positions:
            x = x + self.positions(torch.arange(characters.shape[1], device=x.device))
        for layer in self.layers:
            x = layer(x)
        return functional.linear(self.norm(x), self.embedding.weight)
