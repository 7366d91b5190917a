"""The digits task: scikit-learn's 1,797 images of 8 x 8 pixels, and a small convnet."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from realrun.train.tasks.presets import CONVNETS
from realrun.train.tasks.task import VALIDATION_BATCH, Batch, Task, fingerprint

_HELD_OUT = 5
"""Every fifth image is for validation."""

_CLASSES = 10
_GROUPS = 4


class ConvNet(nn.Module):
    """Images [batch, 1, 8, 8] to logits [batch, 1, 10].

    GroupNorm, not BatchNorm: the statistics that BatchNorm gathers are no parameters. Averages of
    local updates would leave them out, and it would depend on the number of ranks what a batch is.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        widths = (1, channels, 2 * channels, 4 * channels)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
                    nn.GroupNorm(_GROUPS, outputs),
                    nn.ReLU(),
                )
                for inputs, outputs, stride in zip(widths, widths[1:], (1, 2, 2), strict=False)
            )
        )
        self.head = nn.Linear(widths[-1], _CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, 1, 10]: with an axis of length 1, as the loss of texts expects."""
        out: Tensor = self.head(self.layers(images).mean((2, 3)))[:, None]
        return out


class Images(NamedTuple):
    """Images [count, 8, 8] from 0 to 1 and their labels [count], as they are split."""

    train: np.ndarray
    train_labels: np.ndarray
    held: np.ndarray
    held_labels: np.ndarray
    facts: Mapping[str, str]


def split_images() -> Images:
    """Every fifth image is held out."""
    import sklearn  # noqa: PLC0415
    from sklearn.datasets import load_digits  # noqa: PLC0415

    found = load_digits()
    images, labels = found.images.astype(np.float32) / 16.0, found.target  # 0 to 16 shades
    held = np.arange(len(images)) % _HELD_OUT == _HELD_OUT - 1
    facts = {
        "data": "scikit-learn's digits",
        "scikit-learn": sklearn.__version__,
        "sha256": fingerprint(found.images.tobytes(), found.target.tobytes()),
    }
    return Images(images[~held], labels[~held], images[held], labels[held], facts)


def digits(size: str, device: torch.device) -> Task:
    """Classify digits. `support.check` has checked that scikit-learn, an extra, is installed."""
    found = split_images()

    def on_device(images: np.ndarray, labels: np.ndarray) -> Batch:
        inputs, targets = torch.from_numpy(images)[:, None], torch.from_numpy(labels).long()
        return Batch(inputs.to(device), targets[:, None].to(device))

    train = on_device(found.train, found.train_labels)
    seen = on_device(found.held, found.held_labels)

    def draw(numbers: np.ndarray) -> Batch:
        places = torch.from_numpy(numbers).to(device)
        return Batch(train.inputs[places], train.targets[places])

    return Task(
        name="digits",
        loss="cross-entropy, nats per image",
        unit="image",
        units=1,
        choices=len(train.inputs),
        draw=draw,
        validation=tuple(
            Batch(seen.inputs[at : at + VALIDATION_BATCH], seen.targets[at : at + VALIDATION_BATCH])
            for at in range(0, len(seen.inputs), VALIDATION_BATCH)
        ),
        model=lambda: ConvNet(CONVNETS[size]),
        facts={
            **found.facts,
            "train": f"{len(train.inputs)} images",
            "validation": f"{len(seen.inputs)} images",
        },
    )
