"""One question: a cluster, a model, a strategy and how to train, by names, files or objects."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from co2sim import strategies
from co2sim.catalog import Entry, Fact, load_cluster, load_model
from co2sim.cluster import GPU, Cluster
from co2sim.cost import peak_flops
from co2sim.errors import OptionError, nearest
from co2sim.noise import QUIET, Noise
from co2sim.result import Prepared
from co2sim.schedule import DType
from co2sim.units import scaled
from co2sim.workload import Model, Optimizer, Recompute, Workload

_PRECISIONS = (DType.BF16, DType.FP16, DType.FP32)
"""Training precisions, the default first."""
_FIELDS = (
    *(
        "gpus",
        "micro_batch",
        "accumulation",
        "global_batch",
        "rounds",
        "jitter",
        "straggle",
        "seed",
    ),
    *("cluster", "model", "strategy", "precision", "recompute", "optimizer"),
)
_CLUSTER_WIDE = (
    *("name", "gpu", "nodes", "gpus_per_node", "sites", "backend", "communicators", "channels"),
    *("all_reduce", "hops", "interference", "price_per_gpu"),
)
"""What `vary` may change by a single name: of a case, and of its cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A question. Clusters and models are catalog names, paths of files, or objects.

    `strategy` is a text such as "co2(tau=48, worker=node)". `gpus` defaults to the whole cluster,
    `precision` to bf16, or fp16 where the GPU has no bf16. `global_batch` (samples per step over
    all GPUs) sets `accumulation`. `overrides` maps dotted paths of the cluster, or of the model
    behind "model.", to texts with units. `rounds` is how many rounds are averaged (default 1, or 10
    with jitter).
    """

    cluster: str | Cluster
    model: str | Model
    strategy: str | strategies.Strategy
    gpus: int | None = None
    micro_batch: int = 1
    accumulation: int = 1
    global_batch: int | None = None
    precision: str | None = None
    recompute: Recompute = "selective"
    optimizer: Optimizer = "adamw"
    overrides: Mapping[str, str] = field(default_factory=dict)
    noise: Noise = QUIET
    rounds: int | None = None
    fold: bool = True

    def load(self) -> tuple[Entry[Cluster], Entry[Model]]:
        """The cluster and the model, whatever they were given as."""
        for_model = {
            k.removeprefix("model."): v for k, v in self.overrides.items() if k.startswith("model.")
        }
        for_cluster = {k: v for k, v in self.overrides.items() if not k.startswith("model.")}
        cluster = _entry(self.cluster, load_cluster, for_cluster)
        return cluster, _entry(self.model, load_model, for_model)

    def prepare(self) -> Prepared:
        """Load everything and build the schedule. Raises Co2simError when anything is wrong."""
        cluster, model = self.load()
        sized = cluster.value.resized(self.gpus) if self.gpus is not None else cluster.value
        job = self._workload(model.value, sized)
        strategy = self.strategy
        if isinstance(strategy, str):
            strategy = strategies.parse(strategy)
        return Prepared(
            cluster=sized,
            job=job,
            strategy=strategy,
            schedule=strategy.schedule(job, sized.layout),
            assumed=(
                *facts(cluster, model),
                *_beyond_the_file(cluster.value, sized),
                *_beyond_the_table(sized.gpu, job),
            ),
        )

    def _workload(self, model: Model, cluster: Cluster) -> Workload:
        for name, value, allowed in (
            ("recompute", self.recompute, get_args(Recompute)),
            ("optimizer", self.optimizer, get_args(Optimizer)),
        ):
            if value not in allowed:
                raise OptionError(f"{name} is {value!r}; it is one of {', '.join(allowed)}")
        preferred = (str(kind) for kind in _PRECISIONS if kind in cluster.gpu.peak)
        precision = self.precision or next(preferred)
        peak_flops(cluster.gpu, precision)
        if self.recompute == "full" and not any(block.boundary_bytes for block in model.blocks):
            raise OptionError(
                f"recompute=full does not apply to {model.name}: its blocks have no input sizes"
            )
        return Workload(
            model=model,
            micro_batch=self.micro_batch,
            accumulation=self._accumulation(cluster.layout.world_size),
            precision=DType(precision),
            recompute=self.recompute,
            optimizer=self.optimizer,
        )

    def _accumulation(self, gpus: int) -> int:
        if self.global_batch is None:
            return self.accumulation
        if self.accumulation != 1:
            raise OptionError(
                "give accumulation or global_batch, not both: one follows from the other"
            )
        per_micro_step = gpus * self.micro_batch
        if self.global_batch < 1 or self.global_batch % per_micro_step:
            raise OptionError(
                f"global_batch={self.global_batch} is not a multiple of {gpus} GPUs x micro_batch="
                f"{self.micro_batch} = {per_micro_step}"
            )
        return self.global_batch // per_micro_step


def varied(case: Case, changes: Mapping[str, str]) -> Case:
    """The case with several things changed: the strategy first, then all its options at once."""
    options = {
        p.removeprefix("strategy."): t for p, t in changes.items() if p.startswith("strategy.")
    }
    rest = {path: text for path, text in changes.items() if not path.startswith("strategy.")}
    for path in sorted(rest, key=lambda path: path != "strategy"):
        case = vary(case, path, rest[path])
    if not options:
        return case
    strategy = case.strategy
    if isinstance(strategy, str):
        strategy = strategies.parse(strategy)
    return replace(case, strategy=strategies.with_options(strategy, options))


def vary(case: Case, path: str, text: str) -> Case:
    """The case with one thing changed, given as text.

    `path` is a field of `Case` that holds one value, an option of the strategy ("strategy.tau"), or
    anything that `overrides` takes ("inter.bandwidth", "model.layers").
    """
    if path.startswith("strategy."):
        return varied(case, {path: text})
    changes: dict[str, Any] = {}
    if path in {"jitter", "straggle"}:
        changes = {"noise": replace(case.noise, **{path: strategies.parse_number(path, text)})}  # type: ignore[arg-type]
    elif path == "seed":
        changes = {"noise": replace(case.noise, seed=strategies.parse_whole(path, text))}
    elif path in {"gpus", "micro_batch", "accumulation", "global_batch", "rounds"}:
        changes = {path: strategies.parse_whole(path, text)}
    elif path in {"cluster", "model", "strategy", "precision", "recompute", "optimizer"}:
        changes = {path: text}
    elif "." not in path and path not in _CLUSTER_WIDE:
        known = nearest(path, [*_FIELDS, *_CLUSTER_WIDE])
        raise OptionError(
            f"nothing is called {path!r}; {known} (or strategy.OPTION, model.NAME, inter.NAME,"
            " intra.NAME, gpu.NAME, wan.NAME)"
        )
    else:
        changes = {"overrides": {**case.overrides, path: text}}
    return replace(case, **changes)


def _entry(given: Any, load: Any, overrides: Mapping[str, str]) -> Entry[Any]:
    if isinstance(given, str):
        return load(given, overrides)  # type: ignore[no-any-return]
    if overrides:
        raise OptionError(
            f"overrides ({next(iter(overrides))}) apply to names and files, not to objects"
        )
    return Entry(given, ())


def facts(cluster: Entry[Cluster], model: Entry[Model]) -> tuple[Fact, ...]:
    """What no source supports, of both."""
    return (*_under("cluster", cluster), *_under("model", model))


def _under(prefix: str, entry: Entry[Any]) -> list[Fact]:
    return [replace(fact, path=f"{prefix}.{fact.path}") for fact in entry.assumed]


def _beyond_the_file(stated: Cluster, sized: Cluster) -> list[Fact]:
    """More nodes than the cluster has: the what-if of buying more of the same."""
    if sized.nodes <= stated.nodes:
        return []
    why = f"the cluster has {stated.nodes}; more of the same kind were asked for"
    return [Fact("cluster.nodes", str(sized.nodes), why, assumed=True)]


def _beyond_the_table(gpu: GPU, job: Workload) -> list[Fact]:
    """Passes smaller or larger than any whose efficiency is known."""
    works = job.works()
    sizes = [pass_.flops for w in works for pass_ in (w.forward, w.backward) if pass_.flops]
    (least, at_least), (most, at_most) = gpu.efficiency[0], gpu.efficiency[-1]
    found = []
    for size, bound, value, word in (
        (min(sizes, default=least), least, at_least, "smaller"),
        (max(sizes, default=most), most, at_most, "larger"),
    ):
        if (size - bound) * (1 if word == "larger" else -1) > 0:
            why = (
                f"passes of {scaled(size, 'FLOP')} are {word} than any whose efficiency is known"
                f" ({scaled(bound, 'FLOP')})"
            )
            found.append(Fact("cluster.gpu.efficiency", str(value), why, assumed=True))
    return found
