"""Options `--set` with any path and any value."""

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

from fuzz_inputs import NUMBERS, number
from pydantic import BaseModel

from analysis.measured.overrides import UNITS as UNITS_OF
from co2sim.catalog.model_specs import BlocksSpec, TransformerSpec, ViTSpec
from co2sim.catalog.specs import ClusterSpec


@cache
def option_paths() -> tuple[str, ...]:
    """Everything that `--set` changes."""
    models = (TransformerSpec, ViTSpec, BlocksSpec)
    named = {f"model.{name}" for spec in models for name in _names(spec, "")}
    return tuple(sorted({*_names(ClusterSpec, ""), *named, "grid"}))


def _names(spec: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, info in spec.model_fields.items():
        yield f"{prefix}{name}"
        for inner in _specs(info.annotation):
            yield from _names(inner, f"{prefix}{name}.")
        if "list" in str(info.annotation):
            yield from (f"{prefix}{name}.{place}" for place in ("0", "0.value", "\u0663", "99"))
        if "dict" in str(info.annotation):
            yield from (f"{prefix}{name}.{key}" for key in ("bf16", "fp32", "fp8"))


def _specs(hint: Any) -> Iterator[type[BaseModel]]:
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        yield hint
    for inner in getattr(hint, "__args__", ()):
        yield from _specs(inner)


def overrides(rng: random.Random, count: int) -> list[str]:
    """Options `--set` with any path and any value."""
    words = []
    for _ in range(count):
        path = rng.choice(option_paths())
        text = number(rng)
        if rng.random() < 0.8:  # noqa: PLR2004 - else a unit would be wrong nearly always
            usual = f"{10 ** rng.uniform(-6, 9):.3g}"
            unit = "FLOP/s" if ".peak." in path else UNITS_OF.get(path.rpartition(".")[2], "")
            text = f"{rng.choice([usual, rng.choice(['1', '0.5', '4', *NUMBERS])])} {unit}"
        words += ["--set", f"{path}={text}"]
    return words
