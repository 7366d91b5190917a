"""All tasks by name."""

import torch

from realrun.train.digits import digits
from realrun.train.points import points
from realrun.train.segmentation import segmentation
from realrun.train.settings import TrainSettings
from realrun.train.task import Task
from realrun.train.text import masked_text, text


def make_task(settings: TrainSettings, device: torch.device) -> Task:
    """The data and the model of the settings."""
    of_text = {"text": text, "masked_text": masked_text}
    if settings.task in of_text:
        return of_text[settings.task](settings.shape, device)
    others = {"digits": digits, "segmentation": segmentation, "points": points}
    return others[settings.task](settings.size, device)
