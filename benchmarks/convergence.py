"""How well every strategy learns from the same tokens: four workers, real text, tuned rates.

    python benchmarks/convergence.py            # about an hour on two cores; go on with the same
    python benchmarks/convergence.py --quick    # a few configurations, too short to mean anything

Every configuration is tuned with a seed of its own on the final validation loss: the learning rate
on a grid of factors of 2, extended while the best is at its edge, then the outer step on a small
grid at that rate. The best is run with three other seeds. All runs share one launch of the ranks.

Each finished run is a row of convergence-runs.csv; what is there is not run again. Writes
convergence.csv, convergence.md and convergence.png.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd

RESULTS = Path(__file__).parent / "results"
WORKERS = 4
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
    "slowmo": ("momentum=0.5,lr=1", "momentum=0.2,lr=1", "momentum=0.7,lr=1"),
    "diloco": ("momentum=0.9,lr=0.7", "momentum=0.5,lr=1", "momentum=0.9,lr=0.3"),
    "overlap_local_sgd": ("pull=0.6,momentum=0.7", "pull=0.6,momentum=0", "pull=0.3,momentum=0.7"),
}
"""Outer steps to choose from; the first while the learning rate is tuned.

The gain of CO2's, lr / (1 - momentum), is 1, 2 or 1/2: a delayed step may need to be a smaller one.
"""


@dataclass(frozen=True, slots=True)
class Budget:
    """What all configurations have in common: the model, and how much it sees."""

    size: str = "mini"
    steps: int = 768
    batch: int = 32
    warmup: int = 48
    eval_every: int = 96
    quick: bool = False

    @property
    def label(self) -> str:
        """Runs of other budgets do not count."""
        return f"{self.size}-{self.steps}x{self.batch}"


@dataclass(frozen=True, slots=True)
class Configuration:
    """A line of the table. `extra` are options of the outer step that are not tuned."""

    name: str
    strategy: str
    extra: Mapping[str, str] = field(default_factory=dict)
    clips: bool = False

    @property
    def kind(self) -> str:
        """Name of the strategy."""
        return self.strategy.partition(":")[0]

    @property
    def tau(self) -> int:
        """Steps of a round."""
        return int(self.strategy.partition("tau=")[2] or 1)

    @property
    def choices(self) -> tuple[str, ...]:
        """Outer steps to choose from."""
        return OUTER.get(self.kind, ("",))

    def outer(self, choice: str, lr: float) -> str:
        """The options of the outer step in full."""
        options = [choice] if choice else []
        options += [f"{name}={value}" for name, value in self.extra.items()]
        if self.clips:
            options.append(f"clip={CLIP * lr * self.tau:.4g}")
        return ",".join(options)


def configurations(budget: Budget) -> list[Configuration]:
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
    for name, kind in (
        ("SlowMo 12", "slowmo"),
        ("DiLoCo 12", "diloco"),
        ("LocalSGD 12", "local_sgd"),
        ("OverlapLocalSGD 12", "overlap_local_sgd"),
    ):
        found.append(Configuration(name, f"{kind}:tau=12"))
    if budget.quick:
        names = {"AdamW-DDP", "CO2 12, plain", "CO2 12, gap + clip", "LocalSGD 12"}
        return [one for one in found if one.name in names]
    return found


@dataclass(frozen=True, slots=True)
class Ask:
    """One run."""

    configuration: Configuration
    choice: str
    lr: float
    seed: int

    def key(self, budget: Budget) -> tuple[str, ...]:
        """What tells it from other runs."""
        return (budget.label, self.configuration.name, self.choice, f"{self.lr:g}", str(self.seed))


Known = dict[tuple[str, ...], dict[str, Any]]
"""Rows of finished runs by their key."""


def next_run(budget: Budget, known: Known) -> Ask | None:
    """The next run that is missing; None when all are there."""
    for configuration in configurations(budget):
        for ask in wanted(configuration, budget, known):
            if ask.key(budget) not in known:
                return ask
    return None


def wanted(configuration: Configuration, budget: Budget, known: Known) -> Iterator[Ask]:
    """The runs of a configuration; those that depend on others come when these are known."""
    choices = configuration.choices[:2] if budget.quick else configuration.choices
    rates = list(RATES[1:2] if budget.quick else RATES)

    def tuned(choice: str, lr: float) -> Ask:
        return Ask(configuration, choice, lr, TUNING_SEED)

    def loss(choice: str, lr: float) -> float:
        row = known.get(tuned(choice, lr).key(budget))
        return row["validation_loss"] if row else float("inf")

    for lr in rates:
        yield tuned(choices[0], lr)
    for _ in range(0 if budget.quick else EXTENSIONS):
        best = min(rates, key=lambda lr: loss(choices[0], lr))
        missing = any(tuned(choices[0], lr).key(budget) not in known for lr in rates)
        if missing or best not in {rates[0], rates[-1]}:
            break
        further = 2 * best if best == rates[-1] else best / 2
        rates = sorted([*rates, further])
        yield tuned(choices[0], further)
    lr = min(rates, key=lambda rate: loss(choices[0], rate))
    for choice in choices[1:]:
        yield tuned(choice, lr)
    choice = min(choices, key=lambda one: loss(one, lr))
    for seed in SEEDS[:2] if budget.quick else SEEDS:
        yield Ask(configuration, choice, lr, seed)


def run_ranks(budget: Budget, out: Path) -> None:
    """Be one of the ranks: run what is missing, one after the other."""
    import torch.distributed as dist  # noqa: PLC0415

    from realrun.execute.world import join  # noqa: PLC0415

    world = join("gloo", 120.0)
    shared: list[Any] = [read(out)]
    dist.broadcast_object_list(shared)
    known: Known = shared[0]
    began, count = time.monotonic(), 0
    while (ask := next_run(budget, known)) is not None:
        row = one_run(ask, budget, world, out)
        shared = [row]
        dist.broadcast_object_list(shared)
        known[ask.key(budget)] = shared[0]
        if world.rank == 0:
            count += 1
            append(out, shared[0])
            left = remaining(budget, known)
            minutes = left * (time.monotonic() - began) / count / 60
            print(
                f"{ask.configuration.name}, lr {ask.lr:g}, {row['outer'] or 'no outer step'},"
                f" seed {ask.seed}: {row['validation_loss']:.4f} in {row['wall']:.0f} s;"
                f" about {left} runs left, {minutes:.0f} min",
                flush=True,
            )
    world.leave()


def one_run(ask: Ask, budget: Budget, world: Any, out: Path) -> dict[str, Any]:
    """Train once; the row of the table of runs."""
    from co2sim.errors import Co2simError  # noqa: PLC0415
    from realrun.train import TrainSettings, train  # noqa: PLC0415
    from realrun.train.outer import pairs  # noqa: PLC0415

    outer = ask.configuration.outer(ask.choice, ask.lr)
    settings = TrainSettings(
        strategy=ask.configuration.strategy,
        size=budget.size,
        steps=budget.steps,
        batch=budget.batch,
        warmup=budget.warmup,
        lr=ask.lr,
        outer=pairs(outer),
        seed=ask.seed,
        log_every=max(ask.configuration.tau, 12),
        eval_every=budget.eval_every,
    )
    row: dict[str, Any] = {
        "budget": budget.label,
        "configuration": ask.configuration.name,
        "choice": ask.choice,
        "lr": f"{ask.lr:g}",
        "seed": str(ask.seed),
        "strategy": ask.configuration.strategy,
        "outer": outer,
    }
    began = time.monotonic()
    try:
        history = train(settings, world)
    except Co2simError as error:
        if world.rank == 0:  # the ranks cannot go on after that; the launcher starts them again
            append(out, {**row, "validation_loss": float("inf"), "error": str(error)})
        raise
    seen = [r for r in history.rows if r.validation_loss is not None]
    penalties = [r.penalty for r in history.rows if r.penalty is not None]
    facts = history.facts
    return {
        **row,
        "validation_loss": seen[-1].validation_loss,
        "accuracy": seen[-1].accuracy,
        "penalty": mean(penalties) if penalties else float("nan"),
        "clipped": history.rows[-1].clipped if penalties else float("nan"),
        "bytes_sent": history.rows[-1].bytes_sent,
        "wall": time.monotonic() - began,
        "curve": json.dumps([[r.tokens, r.validation_loss] for r in seen]),
        "facts": json.dumps({name: facts[name] for name in ("parameters", "python", "sha256")}),
        "error": "",
    }


def remaining(budget: Budget, known: Known) -> int:
    """About how many runs are left: those that are known to be wanted."""
    asks = [ask for c in configurations(budget) for ask in wanted(c, budget, known)]
    return sum(ask.key(budget) not in known for ask in asks)


def read(out: Path) -> Known:
    """Finished runs."""
    path = out / "convergence-runs.csv"
    if not path.exists():
        return {}
    frame = pd.read_csv(path, dtype={"lr": str, "seed": str}, keep_default_na=False)
    for name in ("validation_loss", "accuracy", "penalty", "clipped", "wall"):
        frame[name] = pd.to_numeric(frame[name], errors="coerce")
    keys = ("budget", "configuration", "choice", "lr", "seed")
    rows = frame.to_dict("records")
    return {tuple(row[name] for name in keys): dict(row) for row in rows}


_COLUMNS = (
    *("budget", "configuration", "choice", "lr", "seed", "strategy", "outer"),
    *("validation_loss", "accuracy", "penalty", "clipped", "bytes_sent", "wall"),
    *("curve", "facts", "error"),
)


def append(out: Path, row: Mapping[str, Any]) -> None:
    """Add a finished run."""
    path = out / "convergence-runs.csv"
    frame = pd.DataFrame([[row.get(name, "") for name in _COLUMNS]], columns=list(_COLUMNS))
    frame.to_csv(path, mode="a", header=not path.exists(), index=False)


def main() -> None:
    """Start the ranks, or be one of them; then write what is complete."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a trial of a minute or two")
    parser.add_argument("--report", action="store_true", help="run nothing, only write the table")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    budget = Budget("tiny", 96, 32, 12, 48, quick=True) if given.quick else Budget()
    if "RANK" in os.environ:
        run_ranks(budget, given.out)
        return
    from convergence_report import write  # noqa: PLC0415 - matplotlib

    from realrun.launch.local import run_local  # noqa: PLC0415

    given.out.mkdir(parents=True, exist_ok=True)
    code = 0
    while not given.report and next_run(budget, read(given.out)) is not None:
        before = len(read(given.out))
        code = run_local([sys.executable, __file__, *sys.argv[1:]], WORKERS)
        if code > 1 or (code and len(read(given.out)) == before):
            break  # control-C, or no run at all; else a run that failed is noted, and not repeated
    write(budget, read(given.out), given.out)
    sys.exit(code)


if __name__ == "__main__":
    main()
