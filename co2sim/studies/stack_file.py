"""The file of a calibrated stack: that which it began with, and what runs said."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import tomlkit

from co2sim.catalog.facts import override, read
from co2sim.common.errors import OptionError
from co2sim.common.units import counted
from co2sim.prediction.case import Case
from co2sim.prediction.intervals import setting_of
from co2sim.studies.calibration import NUMBERS, Calibrated, moved
from co2sim.studies.measured_runs import MeasuredRun

HEAD = "Written by `co2sim calibrate`"
"""How such a file begins, behind its sign of a comment."""

_CALIBRATED = ", calibrated by "


def stack_file(job: Case, runs: Sequence[MeasuredRun], found: Calibrated, name: str) -> bytes:
    """TOML; `name` is that of the file of runs. Raises OptionError for a stack without a file."""
    stack = job.chosen_stack
    if not isinstance(stack, str):
        raise OptionError("the stack must be a name or a file")
    tree: dict[str, Any] = read("stacks", stack)
    for path, text in job.overrides.items():
        if path.startswith("stack."):
            override(tree, path.removeprefix("stack."), text)
    document = tomlkit.document()
    document.add(tomlkit.comment(f"{HEAD}. Predict with it: --stack THIS_FILE"))
    name_before = job.load_stack().value.name.partition(_CALIBRATED)[0]
    measured = [*tree.get("measured", ()), *_settings(runs, found)]
    tree["name"] = f"{name_before}{_CALIBRATED}{counted(len(measured), 'run')}"
    for one in NUMBERS:
        if one.name in found.values:
            tree[one.name] = {
                "value": _rounded(found.values[one.name], one.unit),
                "source": f"`co2sim calibrate`, {name}: {found.determined[one.name]:.0%}"
                f" determined; it was {_rounded(found.before[one.name], one.unit)}",
            }
    tree["measured"] = measured
    for key, value in tree.items():
        document[key] = value
    return tomlkit.dumps(document).encode()


def _rounded(value: float, unit: str) -> float | str:
    return f"{value * 1e6:.4g} us" if unit else float(f"{value:.4g}")


def _settings(runs: Sequence[MeasuredRun], found: Calibrated) -> list[dict[str, Any]]:
    settings = []
    for run, result in zip(runs, found.last, strict=True):
        cluster, model = moved(run.case, found.values).load()
        setting = setting_of(cluster.value, model.value, result, run.case.job().kernels)
        misfit = abs(math.log(result.tokens_per_s_per_gpu / run.tokens_per_s_per_gpu))
        settings.append(asdict(replace(setting, misfit=round(misfit, 4))))
    return settings
