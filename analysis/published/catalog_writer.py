"""Write fitted constants into the catalog, with what they were fitted on."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.published.calibrate import Fit
from analysis.published.parameters import GROUPS, Constant, ConstantGroup, cluster_of
from co2sim.common.errors import CatalogError
from co2sim.common.units import parse
from co2sim.prediction.calibrations import CATALOG, RECORD, Ranges

_SUBSTITUTE = "v100-zeropp"
"""The group whose scatter is used where a fit has no degrees of freedom."""

_SUBSTITUTE_SCATTER = 0.05
"""The scatter where that group was not fitted either."""

_HEAD = (
    "What the fitted constants of the catalog rest on; written by `co2analysis calibrate --write`.",
    "'covariance' is of the constants in SI units, 'scatter' the standard deviation of",
    "log(predicted / published) over the fit cells. 'left_out_errors' are these logarithms of the",
    "cells when their fold is left out, 'interval_factor' is their 90 % quantile in standard",
    "deviations, and 'coverage' the share of cells in intervals that the other folds determine.",
    "'ranges' are the least and the most of each figure among these runs: bit/s a GPU, seconds.",
)


def with_value(text: str, path: str, value: str) -> str:
    """The text of a TOML file with the value at a dotted path replaced, itself as TOML.

    Comments, order and layout stay, and so do the source and all else that a fact says of itself.
    Raises CatalogError when there is no such path.
    """
    import tomlkit  # noqa: PLC0415 - only to write

    document = tomlkit.parse(text)
    *parents, last = path.split(".")
    table: Any = document
    for parent in parents:
        table = table.get(parent, {})
    if last not in table:
        raise CatalogError(f"no {last!r} in [{'.'.join(parents)}]")
    if isinstance(table[last], Mapping):
        table, last = table[last], "value"
    table[last] = tomlkit.value(value)
    return tomlkit.dumps(document)


def catalog_files(fits: Sequence[Fit]) -> dict[Path, bytes]:
    """The files of the catalog that state the constants, with the fitted values."""
    texts: dict[Path, str] = {}
    for fitted in fits:
        for constant in GROUPS[fitted.group].constants:
            value = constant.text(fitted.values[constant.name])
            for file, dotted in constant.places:
                path = Path(str(CATALOG / file))
                text = texts.get(path) or path.read_text()
                try:
                    texts[path] = with_value(text, dotted, value)
                except CatalogError as error:
                    raise CatalogError(f"{path}: {error}") from error
    return {path: text.encode() for path, text in texts.items()}


def record_file(fits: Sequence[Fit]) -> tuple[Path, bytes]:
    """The record with these fits; those of other groups stay as they are."""
    import tomlkit  # noqa: PLC0415 - only to write

    path = Path(str(CATALOG / RECORD))
    before = tomlkit.parse(path.read_text())
    new = {fitted.group: fitted for fitted in fits}
    substitute = new[_SUBSTITUTE].scatter if _SUBSTITUTE in new else before[_SUBSTITUTE]["scatter"]
    document = tomlkit.document()
    for line in _HEAD:
        document.add(tomlkit.comment(line))
    for name in GROUPS:
        if name in new or name in before:
            document.add(tomlkit.nl())
            document.add(
                name, _entry(new[name], substitute) if name in new else _copied(before[name])
            )
    # a table that is copied brings the empty line behind it along
    return path, tomlkit.dumps(document).replace("\n\n\n", "\n\n").encode()


def _copied(entry: Any) -> Any:
    """The table of a group that was not fitted, without what followed it in the file."""
    import tomlkit  # noqa: PLC0415 - only to write

    table = tomlkit.table()
    for key, value in entry.value.body:
        if key is not None:
            table.add(key, value)
    return table


def _entry(fitted: Fit, substitute: float | None) -> Any:
    """The table of one group."""
    import tomlkit  # noqa: PLC0415 - only to write

    group = GROUPS[fitted.group]
    covariance, scatter = fitted.covariance, fitted.scatter
    assumed = None
    if scatter is None:
        scatter = substitute or _SUBSTITUTE_SCATTER
        covariance = fitted.unscaled * scatter**2
        assumed = f"scatter: as many constants as cells; taken from {_SUBSTITUTE}"
    table = tomlkit.table()
    table["source"] = f"cells marked fit of papers/{group.source}: {fitted.cells}"
    table["kinds"] = list(fitted.kinds)
    table["strategies"] = list(fitted.strategies)
    table["ranges"] = ranges_table(fitted.ranges)
    table["constants"] = [constant.name for constant in group.constants]
    table["paths"] = [constant.path for constant in group.constants]
    table["values"] = [_as_written(c, fitted.values[c.name]) for c in group.constants]
    table["bounds"] = [[constant.low, constant.high] for constant in group.constants]
    table["gpus"] = [_gpus(group, constant) for constant in group.constants]
    if group.external:
        ranges = {each.path: [_short(each.low), _short(each.high)] for each in group.external}
        table["external"] = ranges
    table["covariance"] = [[float(f"{value:.6g}") for value in row] for row in covariance]
    table["scatter"] = _rounded(scatter)
    if assumed:
        table["assumed"] = assumed
    table["interval_factor"] = _rounded(fitted.factor, 3)
    table["freedom"] = fitted.freedom
    table["cells"] = fitted.cells
    table["mape"] = _rounded(fitted.mape)
    if fitted.cross_validated is not None:
        table["cross_validated"] = _rounded(fitted.cross_validated)
    if fitted.coverage is not None:
        table["coverage"] = _rounded(fitted.coverage)
    for label, error in fitted.by_label.items():
        table.add(tomlkit.key(["left_out", label]), _rounded(error))
    if fitted.left_out:
        table["left_out_errors"] = [_rounded(error) for error in fitted.left_out]
    return table


def ranges_table(ranges: Ranges) -> Any:
    """Where runs lie, as a record has it, to six digits."""
    import tomlkit  # noqa: PLC0415 - only to write

    table = tomlkit.inline_table()
    table.update({name: [float(f"{end:.6g}") for end in ends] for name, ends in ranges.items()})
    return table


def _gpus(group: ConstantGroup, constant: Constant) -> list[str]:
    """The GPUs that a constant holds for."""
    clusters = constant.clusters or group.clusters
    return [cluster_of(name, group.stack).gpu.name for name in clusters]


def _as_written(constant: Constant, value: float) -> float:
    """The value that the catalog states, in SI units."""
    text = constant.text(value)
    return parse(text.strip('"'), "s") if constant.unit == "s" else float(text)


def _short(value: float) -> float:
    """With six significant digits."""
    return float(f"{value:.6g}")


def _rounded(value: float, digits: int = 4) -> Any:
    """A number as TOML, with a number of digits behind the point."""
    import tomlkit  # noqa: PLC0415 - only to write

    return tomlkit.value(f"{value:.{digits}f}")
