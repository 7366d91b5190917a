"""Bytes of text through gated convolutions, with attention in every third layer.

co2sim run -c dgx-h100 -g 64 -s fsdp -m examples/own_model.py:build
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Layer(nn.Module):
    """A gated convolution, or gated attention, and an MLP."""

    def __init__(self, width: int, *, attends: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.conv = None if attends else nn.Conv1d(width, width, 4, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        """Both parts are added to their inputs."""
        q, k, v, gate = self.inner(self.norms[0](x)).chunk(4, dim=-1)
        if self.conv is None:
            q, k, v = (y.unflatten(-1, (-1, 64)).transpose(1, 2) for y in (q, k, v))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            y = y.transpose(1, 2).flatten(2)
        else:
            y = q * self.conv(functional.pad((k * v).mT, (3, 0))).mT
        x = x + self.outer(y * functional.silu(gate))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norms[1](x))))
        return out


def build(width: int = 1024, layers: int = 24) -> nn.Module:
    """The module, with logits of the next byte."""
    inner = nn.Sequential(*(Layer(width, attends=n % 3 == 2) for n in range(layers)))
    return nn.Sequential(
        nn.Embedding(256, width), inner, nn.LayerNorm(width), nn.Linear(width, 256)
    )


def small() -> nn.Module:
    """One that a processor trains."""
    return build(256, 6)


def batch() -> Tensor:
    """Four samples of 256 bytes."""
    return torch.randint(0, 256, (4, 256))


def loss(model: nn.Module, text: Tensor) -> Tensor:
    """The mean over all bytes but the first of each sample."""
    return functional.cross_entropy(model(text)[:, :-1].flatten(0, 1), text[:, 1:].flatten())
