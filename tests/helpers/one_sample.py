"""Questions about one sample per GPU and step, unless they say more: hands can check the answer."""

from typing import TYPE_CHECKING, Any

import co2sim
from co2sim import Result

if TYPE_CHECKING:
    import pandas as pd


def simulate(*asked: Any, **options: Any) -> Result:
    """`co2sim.simulate` with a batch in numbers."""
    return co2sim.simulate(*asked, **numbers(options))


def sweep(*asked: Any, **options: Any) -> "pd.DataFrame":
    """`co2sim.sweep` with a batch in numbers, but for what varies."""
    return co2sim.sweep(*asked, **numbers(options, options["vary"]))


def numbers(options: dict[str, Any], varied: Any = ()) -> dict[str, Any]:
    """The options, with one sample, one micro-step and no recomputation where nothing says it."""
    batch: dict[str, Any] = {"micro_batch": 1, "recompute": "none"}
    if options.get("global_batch") is None and "global_batch" not in varied:
        batch["accumulation"] = 1
    return {name: one for name, one in batch.items() if name not in varied} | options
