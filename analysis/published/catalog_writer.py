"""Write fitted constants into the catalog, with what they were fitted on."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from analysis.published.calibrate import Fit
from analysis.published.parameters import CATALOG, GROUPS, RECORD
from co2sim.errors import CatalogError

_TAIL = 0.95
"""Of a two-sided 90 % interval."""

_BORROWED = "v100-zeropp"
"""Whose scatter stands in where a fit has no degrees of freedom."""

_HEAD = """\
# What the fitted constants of the catalog rest on; written by `co2analysis calibrate --write`.
# 'covariance' is of the constants in SI units, 'scatter' the standard deviation of
# log(predicted / published) over the fit cells, 'interval_factor' the quantile for 90 % intervals.
"""


def rewritten(text: str, section: str, key: str, value: str) -> str:
    """The text of a TOML file with the value of one key replaced; what it cites stays.

    Raises CatalogError when the section has no such key.
    """
    lines, here = text.splitlines(), ""
    for number, line in enumerate(lines):
        if line.startswith("["):
            here = line.strip("[] ")
        if here == section and line.partition("=")[0].strip() == key:
            old = line.partition("=")[2].strip()
            if old.startswith("{"):
                rest = old.partition(",")[2]
                lines[number] = f"{key} = {{ value = {value},{rest}"
            else:
                lines[number] = f"{key} = {value}"
            return "\n".join(lines) + "\n"
    raise CatalogError(f"no {key!r} in [{section}]")


def catalog_files(fits: Sequence[Fit]) -> dict[Path, bytes]:
    """The files of the catalog that state the constants, with the fitted values."""
    texts: dict[Path, str] = {}
    for found in fits:
        for constant in GROUPS[found.group].constants:
            path = Path(str(CATALOG / constant.file))
            text = texts.get(path) or path.read_text()
            parents = constant.path.removeprefix("gpu.").split(".")
            section, key = ".".join(parents[:-1]), parents[-1]
            texts[path] = rewritten(text, section, key, constant.text(found.values[constant.name]))
    return {path: text.encode() for path, text in texts.items()}


def record_file(fits: Sequence[Fit]) -> tuple[Path, bytes]:
    """The record of the fits."""
    scatter = {found.group: found.scatter for found in fits}
    parts = [_HEAD, *(_entry(found, scatter) for found in fits)]
    return Path(str(CATALOG / RECORD)), "\n".join(parts).encode()


def _entry(found: Fit, scatter: Mapping[str, float | None]) -> str:
    from scipy.stats import t  # noqa: PLC0415 - slow, and an optional extra

    group = GROUPS[found.group]
    covariance, own, factor = found.covariance, found.scatter, 1.645
    note = ""
    if own is None:
        own = scatter.get(_BORROWED) or 0.05
        covariance = found.unscaled * own**2
        note = f'assumed = "scatter: as many constants as cells; taken from {_BORROWED}"\n'
    else:
        factor = float(t.ppf(_TAIL, found.freedom))
    rows = ", ".join(
        "[" + ", ".join(f"{value:.6g}" for value in row) + "]" for row in np.asarray(covariance)
    )
    held = (
        "" if found.cross_validated is None else f"cross_validated = {found.cross_validated:.4f}\n"
    )
    for label, error in found.by_label.items():
        held += f"left_out.{label} = {error:.4f}\n"
    names = ", ".join(f'"{constant.name}"' for constant in group.constants)
    return (
        f"[{found.group}]\n"
        f'source = "cells marked fit of papers/{group.source}: {found.cells}"\n'
        f"constants = [{names}]\n"
        f"covariance = [{rows}]\n"
        f"scatter = {own:.4f}\n{note}"
        f"interval_factor = {factor:.3f}\n"
        f"freedom = {found.freedom}\n"
        f"cells = {found.cells}\n"
        f"mape = {found.mape:.4f}\n{held}"
    )
