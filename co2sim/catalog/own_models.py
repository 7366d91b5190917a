"""Models of a user's own: the module that a Python file builds, or a file written of one."""

import json
import os
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from co2sim.catalog.facts import Fact, Tree, usual_sequence
from co2sim.catalog.huggingface import name_of
from co2sim.catalog.model_files import model_from_json, model_to_json
from co2sim.common.errors import CatalogError, OptionError
from co2sim.models.operators import Model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from co2sim.tracing.from_torch import Batch, Build, Loss, Source

_MOST_TRACED = 16
"""Models that are kept: a study asks for one again and again."""


def from_torch(
    build: "Build",
    batch: "Batch",
    loss: "Loss | None" = None,
    name: str = "",
    tp_plan: "Mapping[str, Any] | None" = None,
) -> Model:
    """The model of the torch module that `build()` returns, trained on what `batch()` returns.

    Traces one step on fake tensors, without a GPU. `loss(model, batch)` gives a scalar; None:
    `.loss` of what the module returns, else the mean of its first tensor. `tp_plan` are paths of
    modules, as `parallelize_module` of PyTorch takes them, with "colwise" or "rowwise", by which
    tensor-parallel GPUs divide it; None: the `tp_plan` of the module, if it has one, as those of
    transformers have. Needs PyTorch. Raises OptionError for what cannot be traced.
    """
    from co2sim.tracing.from_torch import trace  # noqa: PLC0415 - it imports torch
    from co2sim.tracing.traced import model_of  # noqa: PLC0415 - only of traces

    step = trace(build, batch, loss, tp_plan)
    return model_of(step, name or step.modules[0].kind)


def traced_tree(reference: str) -> Tree:
    """What a file would say of the module of "my_model.py:build". Raises OptionError."""
    from co2sim.tracing.from_torch import load_build  # noqa: PLC0415 - it imports torch

    path, _, function = reference.partition(".py:")
    name = f"{Path(path).name.removesuffix('.py')}:{function or 'build'}"
    return _kept(load_build, reference, name, _changed(f"{path.removesuffix('.py')}.py"))


def _changed(path: str) -> float:
    """When a file was written last; 0 where there is none."""
    try:
        return os.stat(path).st_mtime  # noqa: PTH116 - Path.stat raises more
    except (OSError, ValueError):
        return 0.0


def can_trace(model_type: object) -> bool:
    """Whether a class of transformers for a type of models is installed."""
    installed = all(find_spec(name) for name in ("torch", "transformers"))
    return installed and str(model_type) in import_module("transformers").CONFIG_MAPPING


def transformers_tree(config: Tree, reference: str) -> Tree:
    """What a file would say of the class of transformers that a `config.json` names."""
    try:
        return _kept(_of_config, json.dumps(config), name_of(config, reference), 0.0)
    except OptionError as error:
        raise OptionError(
            f"{error} (a class that needs other inputs than tokens or an image: give a file with"
            " build() and batch(), docs/any-model.md)"
        ) from error


def _of_config(text: str) -> "Source":
    """With a sequence as models of its size are trained on."""
    from co2sim.tracing.from_torch import load_config  # noqa: PLC0415 - it imports torch

    return load_config(text, lambda parameters: int(usual_sequence(parameters)["tokens"]))


@lru_cache(maxsize=_MOST_TRACED)
def _kept(load: "Callable[[str], Source]", reference: str, name: str, _changed: float) -> Tree:
    source = load(reference)
    model = from_torch(source.build, source.batch, source.loss, name, source.tp_plan)
    return model_to_json(model)


def read_model(tree: Tree, reference: str, overrides: "Mapping[str, str]") -> tuple[Model, Any]:
    """The model of a file with all of its operators, and what was assumed as it was traced."""
    if overrides:
        path = next(iter(overrides))
        raise CatalogError(
            f"--set model.{path}: {reference} says operators, which have no such number; change the"
            " module or its batch, and trace it again"
        )
    model = model_from_json(tree)
    source = "not known without data"
    return model, tuple(Fact("trace", text, source, assumed=True) for text in model.assumed)
