"""A small transformer: pre-norm blocks, learned positions, a head tied to the embedding."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from realrun.train.shapes import VOCABULARY, GPTShape

_SPREAD = 0.02
"""Standard deviation of initial weights, as in GPT-2."""


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
        self.positions = nn.Embedding(shape.context, shape.hidden)
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
        places = torch.arange(characters.shape[1], device=characters.device)
        x = self.embedding(characters) + self.positions(places)
        for layer in self.layers:
            x = layer(x)
        return functional.linear(self.norm(x), self.embedding.weight)
