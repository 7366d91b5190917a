"""All tasks by name."""

import torch

from realrun.train.tasks.images import digits, segmentation
from realrun.train.tasks.point_clouds import points
from realrun.train.tasks.presets import GPTShape
from realrun.train.tasks.task import Task
from realrun.train.tasks.text import masked_text, text


def make_task(name: str, size: str, shape: GPTShape, device: torch.device) -> Task:
    """The data and the model of a task; those of texts have a shape, all others a size."""
    of_text = {"text": text, "masked_text": masked_text}
    if name in of_text:
        return of_text[name](shape, device)
    return {"digits": digits, "segmentation": segmentation, "points": points}[name](size, device)
