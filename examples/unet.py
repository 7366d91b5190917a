"""The U-Net of Ho et al. (2020, arXiv:2006.11239) for images of 32 x 32: 35.7M parameters.

co2sim run -c dgx-h100 -g 8 -s ddp -m examples/unet.py:build
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, TIMES = 128, (1, 2, 2, 2)
"""Channels, and how many times as many each resolution has: 32, 16, 8 and 4."""


class Residual(nn.Module):
    """Two convolutions, with the time of the noise between them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(32, n) for n in (inputs, outputs))
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(4 * WIDTH, outputs)
        self.past = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Image and time, activated by SiLU before each product."""
        y = self.first(functional.silu(self.norms[0](x)))
        y = y + self.time(functional.silu(time))[:, :, None, None]
        y = functional.dropout(functional.silu(self.norms[1](y)), 0.1, self.training)
        out: Tensor = self.past(x) + self.second(y)
        return out


class Attention(nn.Module):
    """One head over all places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width)
        self.inner, self.outer = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor, _time: Tensor) -> Tensor:
        """The time is not used."""
        places = self.inner(self.norm(x)).flatten(2).mT.unsqueeze(1)
        y = functional.scaled_dot_product_attention(*places.chunk(3, dim=-1))
        out: Tensor = x + self.outer(y.squeeze(1).mT.reshape(x.shape))
        return out


class UNet(nn.Module):
    """The noise of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, 4 * WIDTH)
        )
        self.first = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        now, kept = WIDTH, [WIDTH]
        for level, times in enumerate(TIMES):
            for _ in range(2):
                self.down.append(self.part(now, times * WIDTH, level))
                now = times * WIDTH
                kept.append(now)
            if level < len(TIMES) - 1:
                self.down.append(nn.Conv2d(now, now, 3, 2, padding=1))
                kept.append(now)
        self.middle = nn.ModuleList([Residual(now, now), Attention(now), Residual(now, now)])
        for level, times in reversed(list(enumerate(TIMES))):
            for _ in range(3):
                self.up.append(self.part(now + kept.pop(), times * WIDTH, level))
                now = times * WIDTH
            if level:
                self.up.append(nn.Conv2d(now, now, 3, padding=1))
        self.norm, self.last = nn.GroupNorm(32, now), nn.Conv2d(now, 3, 3, padding=1)

    @staticmethod
    def part(inputs: int, outputs: int, level: int) -> nn.Module:
        """A residual block, with attention behind it at 16 x 16."""
        parts = [Residual(inputs, outputs), *([Attention(outputs)] if level == 1 else [])]
        return nn.ModuleList(parts)

    def forward(self, image: Tensor, time: Tensor) -> Tensor:
        """Of each image at its time."""
        rates = torch.exp(torch.arange(WIDTH // 2) * (-9.21 / (WIDTH // 2 - 1)))
        angles = time[:, None] * rates
        at = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        x = self.first(image)
        kept = [x]
        for part in self.down:
            x = run(part, x, at)
            kept.append(x)
        x = run(self.middle, x, at)
        for part in self.up:
            if isinstance(part, nn.Conv2d):
                x = part(functional.interpolate(x, scale_factor=2))
            else:
                x = run(part, torch.cat([x, kept.pop()], dim=1), at)
        out: Tensor = self.last(functional.silu(self.norm(x)))
        return out


def run(part: nn.Module, x: Tensor, time: Tensor) -> Tensor:
    """A convolution, or blocks one after the other."""
    if not isinstance(part, nn.ModuleList):
        out: Tensor = part(x)
        return out
    for block in part:
        x = block(x, time)
    return x


def build() -> nn.Module:
    """The module."""
    return UNet()


def batch() -> tuple[Tensor, Tensor]:
    """Two images, and the times of their noise."""
    return torch.randn(2, 3, 32, 32), torch.rand(2)


def loss(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    """The squared error of the noise."""
    return functional.mse_loss(model(*given), torch.randn_like(given[0]))
