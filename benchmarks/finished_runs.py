"""The file of a study's finished runs: a row each. Needs no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

Known = dict[tuple[str, ...], dict[str, Any]]
"""Rows of finished runs by their key."""

_KEYS = ("budget", "configuration", "choice", "lr", "seed")
_COLUMNS = (
    *(*_KEYS, "strategy", "outer"),
    *("validation_loss", "accuracy", "penalty", "clipped", "bytes_sent", "wall"),
    *("curve", "facts", "error"),
)


def read(path: Path) -> Known:
    """Finished runs; none where there is no file."""
    if not path.exists():
        return {}
    frame = pd.read_csv(path, dtype={"lr": str, "seed": str}, keep_default_na=False)
    for name in ("validation_loss", "accuracy", "penalty", "clipped", "wall"):
        frame[name] = pd.to_numeric(frame[name], errors="coerce")
    rows = frame.to_dict("records")
    return {tuple(row[name] for name in _KEYS): dict(row) for row in rows}


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add a finished run."""
    frame = pd.DataFrame([[row.get(name, "") for name in _COLUMNS]], columns=list(_COLUMNS))
    frame.to_csv(path, mode="a", header=not path.exists(), index=False)
