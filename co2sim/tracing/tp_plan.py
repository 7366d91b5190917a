"""Tensor parallelism by a plan: what of a traced module ranks divide, found by its storages.

A plan names modules, as `torch.distributed.tensor.parallel.parallelize_module` takes it and
transformers write it. Outputs of colwise products are divided, and so is what a kernel writes that
reads what is divided, until a rowwise product. All else is whole on every rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from co2sim.common.errors import OptionError, given
from co2sim.tracing.trace import ConvolutionShape, Kernel, Parameter, ProductShape, Trace

Style = Literal["colwise", "gathered", "rowwise", "table"]
"""gathered: colwise, with all columns on every rank behind it. table: entries of a look-up."""

_STYLES: Mapping[str, Style | None] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "embedding_rowwise": "table",
    **dict.fromkeys(("colwise_gather_output", "colwise_rep"), "gathered"),
    **dict.fromkeys(("replicate", "replicated_with_grad_allreduce"), None),
}
"""Words of transformers 4 and 5.23, distributed/parallel_utils.py; None: whole."""
_LAYOUTS = {
    "ColwiseParallel (Replicate(),) (Shard(dim=-1),)": "colwise",
    "ColwiseParallel (Replicate(),) (Replicate(),)": "colwise_gather_output",
    "RowwiseParallel (Shard(dim=-1),) (Replicate(),)": "rowwise",
    "RowwiseParallel (Replicate(),) (Replicate(),)": "embedding_rowwise",
}
"""Classes of PyTorch with the layouts of their inputs and outputs."""


@dataclass(frozen=True, slots=True)
class Division:
    """What a plan divides: modules by path, storages with the colwise kernels they come from.

    `refusal` says why a module's plan divides nothing.
    """

    styles: Mapping[str, Style] = field(default_factory=dict)
    storages: Mapping[int, frozenset[int]] = field(default_factory=dict)
    refusal: str = ""


def plan_of(plan: object) -> dict[str, str]:
    """A plan as its words. Raises OptionError for what is no mapping of paths."""
    if not isinstance(plan, Mapping) or not all(isinstance(path, str) for path in plan):
        raise OptionError(
            f'tp_plan is {given(plan)}; it must be such as {{"layers.*.up": "colwise"}}'
        )
    words = {}
    for path, style in plan.items():
        sides = (str(getattr(style, f"{side}_layouts", "")) for side in ("input", "output"))
        word = style if isinstance(style, str) else " ".join((type(style).__name__, *sides))
        words[path] = _LAYOUTS.get(word, word)
    return words


def division_of(trace: Trace, weights: Mapping[int, Parameter]) -> Division:
    """What the plan of a trace divides; `weights` are parameters by storages, those of copies too.

    Raises OptionError for a plan that the user gave and that does not divide the module.
    """
    try:
        styles = _styles(trace)
        _check_shared(trace, styles)
        return Division(styles, _followed(trace, styles, weights) if styles else {})
    except OptionError as error:
        if not trace.own_plan:
            raise
        return Division(refusal=str(error))


def columns_of(kernel: Kernel) -> int:
    """Those of the weight of a product."""
    assert isinstance(kernel.shape, ProductShape)
    return kernel.shape.rows if kernel.shape.parameter == "left" else kernel.shape.columns


def _styles(trace: Trace) -> dict[str, Style]:
    """The modules that a plan names, with what it does to them."""
    lookups = {kernel.module for kernel in trace.kernels if kernel.name == "embedding"}
    products = {kernel.module for kernel in trace.kernels if _weighs(kernel)}
    styles: dict[str, Style] = {}
    for pattern, word in trace.plan.items():
        paths = [module.path for module in trace.modules if _fits(module.path, pattern)]
        if not paths and not trace.own_plan:
            raise OptionError(f"tp_plan: no module is {given(pattern)}")
        paths += [x.path for x in trace.parameters if _fits(x.path, pattern)]
        if paths and word not in _STYLES:
            raise OptionError(
                f"tp_plan: {pattern} is {given(word)}; it may be {', '.join(_STYLES)}"
            )
        style = _STYLES.get(word)
        for path in paths if style else ():
            made = "table" if path in lookups and style == "rowwise" else style
            if not made or path not in (lookups if made == "table" else products):
                raise OptionError(
                    f"tp_plan: {path} cannot be {word}: products with their own weight can,"
                    " and look-ups can be rowwise"
                )
            styles[path] = made
    return styles


def _fits(path: str, pattern: str) -> bool:
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _weighs(kernel: Kernel) -> bool:
    return isinstance(kernel.shape, ProductShape) and bool(kernel.shape.parameter)


def _check_shared(trace: Trace, styles: Mapping[str, Style]) -> None:
    """Modules with one weight divide it along one dimension."""
    for parameter in trace.parameters:
        paths = [path.rpartition(".")[0] for path in (parameter.path, *parameter.aliases)]
        found = {styles.get(path, "") for path in paths}
        if len(found) > 1 and found & {"", "rowwise"}:
            raise OptionError(
                f"tp_plan: {' and '.join(paths)} share a weight, and it divides them differently"
            )


def _followed(
    trace: Trace, styles: Mapping[str, Style], weights: Mapping[int, Parameter]
) -> dict[int, frozenset[int]]:
    """The divided storages. Of a product the gradient of its input is what the input is."""
    storages: dict[int, frozenset[int]] = {}
    for i, kernel in enumerate(trace.kernels):
        sources = frozenset[int]().union(*(storages.get(x.storage, ()) for x in kernel.reads))
        style, forward = styles.get(kernel.module), kernel.phase == "forward"
        if forward and (style == "rowwise" or sources):
            _check(trace, kernel, style, sources, weights)
        if _weighs(kernel):
            makes = style == ("colwise" if forward else "rowwise")
            sources = frozenset({i}) if makes else frozenset()
        if sources:
            storages.update((x.storage, sources) for x in kernel.writes)
    return storages


def _check(
    trace: Trace,
    kernel: Kernel,
    style: Style | None,
    sources: frozenset[int],
    weights: Mapping[int, Parameter],
) -> None:
    """Refuse a weight that meets a part of what it needs, or needs a part and meets all."""
    if style == "rowwise":
        if _weighs(kernel) and not sources:
            raise OptionError(f"tp_plan: {kernel.module} is rowwise, and nothing divides its input")
        return
    first = trace.kernels[min(sources)]
    own = [weights[x.storage].numel for x in kernel.reads if x.storage in weights]
    wide = not style and any(size >= columns_of(first) for size in own)
    if _weighs(kernel) or wide or isinstance(kernel.shape, ConvolutionShape):
        raise OptionError(
            f"tp_plan: {kernel.module} has a weight for all of what {first.module} divides;"
            " only a rowwise product may"
        )
