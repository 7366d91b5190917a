"""Training on real data with every strategy: `realrun train`, and `train` for studies."""

from typing import TYPE_CHECKING, Any

from realrun.train.log import History, LogRow
from realrun.train.settings import TrainSettings

if TYPE_CHECKING:
    from realrun.train.loop import Standing, train

__all__ = ["History", "LogRow", "Standing", "TrainSettings", "train"]


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is asked for: a command line checks its input first."""
    if name in {"Standing", "train"}:
        from realrun.train import loop  # noqa: PLC0415

        return getattr(loop, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
