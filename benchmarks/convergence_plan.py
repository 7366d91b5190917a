"""The plan of the convergence study: what is run next, given what is there."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from finished_runs import Known

from co2sim.late_averages import kept
from co2sim.strategies import parse
from co2sim.strategies.co2 import CO2
from co2sim.strategies.local import LocalSteps
from realrun.train.settings import TaskName

RUNS = "convergence-runs.csv"
"""The file of finished runs."""

TUNING_SEED = 100
SEEDS = (0, 1, 2)
RATES = (2.5e-3, 5e-3, 1e-2)
"""Where tuning begins."""

EXTENSIONS = 2
"""How many factors of 2 the grid may grow beyond either end."""

CLIP = 0.25
"""Momenta are clipped to so many lr x tau: what a worker moves an element at most is about 1."""

OUTER = {
    "co2": (
        *("momentum=0.5,lr=0.5", "momentum=0.2,lr=0.8", "momentum=0,lr=1"),
        *("momentum=0.5,lr=1", "momentum=0,lr=0.5"),
    ),
    "slowmo": (
        *("momentum=0.2,lr=0.9", "momentum=0.5,lr=1"),
        *("momentum=0.2,lr=1", "momentum=0.7,lr=1"),
    ),
    "diloco": ("momentum=0.9,lr=0.7", "momentum=0.5,lr=1", "momentum=0.9,lr=0.3"),
    "overlap_local_sgd": ("pull=0.6,momentum=0.7", "pull=0.6,momentum=0", "pull=0.3,momentum=0.7"),
}
"""Outer steps to choose from; the first while the learning rate is tuned.

The gain of CO2's, lr / (1 - momentum), is 1, 2 or 1/2: a delayed step may need to be a smaller one.
"""

PEERS = ("momentum=0,lr=1", "momentum=0.9,lr=0.4")
"""Those of Eager DiLoCo: a gain of 1, and the outer step of its paper, as we read it.

DiLoCo's first, with a gain of 7, gave 2.95 at the lowest rate.
"""


KEPT = (
    *("keep=1", "keep=0.5,predict=0.5", "keep=0.75,predict=0.25", "keep=0.25,predict=0.75"),
    "keep=0.25,predict=1",
    *(f"{kept},momentum=0.2,lr=0.9" for kept in ("keep=1", "keep=0.25,predict=1")),
)
"""What CO2 with a delay keeps and predicts, to choose from, and outer steps other than x <- mean.

The rate is tuned with what CO2 takes by itself in rounds of that length.
"""

PREVIEWED = ("keep=1,momentum=0.9,lr=0.1", "keep=1,momentum=0.8,lr=0.2")
"""Outer steps of CO2 with a preview: they take the place of AdamW's momentum."""


def split(choice: str) -> tuple[str, str]:
    """The options of a choice that are part of a strategy, and those of the outer step."""
    options = [one for one in choice.split(",") if one]
    kept = [one for one in options if one.partition("=")[0] in {"keep", "predict"}]
    return ",".join(kept), ",".join(one for one in options if one not in kept)


@dataclass(frozen=True, slots=True)
class StudyBudget:
    """What all configurations have in common: the model, and how much it sees."""

    size: str = "mini"
    steps: int = 768
    batch: int = 32
    warmup: int = 48
    eval_every: int = 96
    workers: int = 4
    quick: bool = False
    task: TaskName = "text"
    choices: int = 100
    """Outer steps that are tried at most."""

    @classmethod
    def small(cls) -> "StudyBudget":
        """A trial of seconds, too short to mean anything."""
        return cls("tiny", 24, 32, 4, 12, workers=2, quick=True)

    @property
    def label(self) -> str:
        """Runs of other budgets do not count."""
        named = "" if self.task == "text" else f"{self.task}-"
        return f"{named}{self.size}-{self.steps}x{self.batch}"


@dataclass(frozen=True, slots=True)
class Configuration:
    """A line of the table. `extra` are options of the outer step that are not tuned.

    `peer`: Eager DiLoCo, to which `strategy` only gives the length of a round and the options.
    `momentum` is AdamW's, its first beta.
    """

    name: str
    strategy: str
    extra: Mapping[str, str] = field(default_factory=dict)
    clips: bool = False
    peer: bool = False
    momentum: float = 0.9

    @property
    def kind(self) -> str:
        """Name of the strategy."""
        return self.strategy.partition(":")[0]

    @property
    def tau(self) -> int:
        """Steps of a round."""
        strategy = parse(self.strategy)
        return int(strategy.tau) if isinstance(strategy, LocalSteps) else 1

    @property
    def choices(self) -> tuple[str, ...]:
        """Outer steps to choose from; where workers keep progress, how much, too.

        The usual is first.
        """
        if self.peer:
            return PEERS
        if not self.keeps:
            return OUTER.get(self.kind, ("",))
        if "preview" in self.strategy:
            return PREVIEWED
        share, rest = kept(self.tau, None, None)
        usual = f"keep={share:g}" + (f",predict={rest:g}" if rest else "")
        return tuple(sorted(KEPT, key=lambda choice: choice != usual))

    @property
    def keeps(self) -> bool:
        """Whether a choice is part of the strategy: CO2 with a delay."""
        strategy = parse(self.strategy)
        return isinstance(strategy, CO2) and strategy.delay is not None

    def trained(self, choice: str) -> str:
        """The strategy with what of a choice is part of it."""
        kept, _ = split(choice)
        return f"{self.strategy},{kept}" if kept else self.strategy

    def outer(self, choice: str, lr: float) -> str:
        """The options of the outer step in full."""
        _, chosen = split(choice)
        options = [chosen] if chosen else []
        options += [f"{name}={value}" for name, value in self.extra.items()]
        if self.clips:
            options.append(f"clip={CLIP * lr * self.tau:.4g}")
        return ",".join(options)


def configurations(budget: StudyBudget) -> list[Configuration]:
    """All lines of the table."""
    found = [Configuration("AdamW-DDP", "ddp")]
    for tau in (3, 12, 48):
        for words, gap, clips in (
            ("plain", "constant", False),
            ("gap", "gap_aware", False),
            ("clip", "constant", True),
            ("gap + clip", "gap_aware", True),
        ):
            name = f"CO2 {tau}, {words}"
            found.append(Configuration(name, f"co2:tau={tau}", {"gap": gap}, clips))
    alone = "co2:tau=1,delay=1,preview=true"
    found.append(Configuration("CO2 delay 1, tau 1, preview", alone, momentum=0.0))
    short = ((12, 1, 12), (3, 1, 3), (2, 1, 2), (1, 1, 1))
    for tau, delay, parts in (*short, (12, 4, 1), (12, 4, 3), (12, 4, 12)):
        name = f"CO2 delay {delay}, tau {tau}" + (f", {parts} fragments" if parts > 1 else "")
        strategy = f"co2:tau={tau},delay={delay},fragments={parts}"
        found.append(Configuration(name, strategy))
    streamed = "diloco:tau=12,fragments=3,delay=4"
    found.append(Configuration("Streaming DiLoCo delay 4, tau 12", streamed))
    found.append(Configuration("Eager DiLoCo 12", "diloco:tau=12", peer=True))
    for name, kind in (
        ("SlowMo 12", "slowmo"),
        ("DiLoCo 12", "diloco"),
        ("LocalSGD 12", "local_sgd"),
        ("OverlapLocalSGD 12", "overlap_local_sgd"),
    ):
        found.append(Configuration(name, f"{kind}:tau=12"))
    if budget.quick:
        names = {"CO2 12, gap + clip", "CO2 delay 4, tau 12", "Eager DiLoCo 12"}
        return [one for one in found if one.name in names]
    return found


@dataclass(frozen=True, slots=True)
class Ask:
    """One run."""

    budget: StudyBudget
    configuration: Configuration
    choice: str
    lr: float
    seed: int

    @property
    def key(self) -> tuple[str, ...]:
        """What tells it from other runs."""
        name = self.configuration.name
        return (self.budget.label, name, self.choice, f"{self.lr:g}", str(self.seed))


Plan = Callable[[Known], Iterable[Ask]]
"""The runs that are wanted, in their order, as far as the finished ones tell."""


def study(budget: StudyBudget, known: Known) -> Iterator[Ask]:
    """The runs of all configurations."""
    for configuration in configurations(budget):
        yield from wanted(configuration, budget, known)


def missing(plan: Plan, known: Known) -> list[Ask]:
    """The runs that are wanted and not there; further ones may depend on them."""
    return [ask for ask in plan(known) if ask.key not in known]


def wanted(configuration: Configuration, budget: StudyBudget, known: Known) -> Iterator[Ask]:
    """The runs of a configuration; those that depend on others come when these are known."""
    choices = configuration.choices[: 2 if budget.quick else budget.choices]
    rates = list(RATES[1:2] if budget.quick else RATES)

    def tuned(choice: str, lr: float) -> Ask:
        return Ask(budget, configuration, choice, lr, TUNING_SEED)

    def loss(choice: str, lr: float) -> float:
        row = known.get(tuned(choice, lr).key)
        return row["validation_loss"] if row else float("inf")

    for lr in rates:
        yield tuned(choices[0], lr)
    for _ in range(0 if budget.quick else EXTENSIONS):
        best = min(rates, key=lambda lr: loss(choices[0], lr))
        lacking = any(tuned(choices[0], lr).key not in known for lr in rates)
        if lacking or best not in {rates[0], rates[-1]}:
            break
        further = 2 * best if best == rates[-1] else best / 2
        rates = sorted([*rates, further])
        yield tuned(choices[0], further)
    lr = min(rates, key=lambda rate: loss(choices[0], rate))
    for choice in choices[1:]:
        yield tuned(choice, lr)
    choice = min(choices, key=lambda one: loss(one, lr))
    for seed in SEEDS[:2] if budget.quick else SEEDS:
        yield Ask(budget, configuration, choice, lr, seed)
