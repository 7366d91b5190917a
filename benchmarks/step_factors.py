"""How many steps of each method are worth one of DDP, from the runs of `convergence.py`.

The loss that a method ends with is looked up on the mean curve of DDP: the same run length, warm-up
and decay, each at its own best learning rate. A run of DDP that was as short as that, with its
learning rate decayed by then, would have reached the loss sooner: the factors are lower bounds.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pandas as pd
from convergence import RUNS, configurations
from reports import FOLDER, RESULTS, made_by, parser, table
from studies import TUNING_SEED, Budget

from co2sim.strategies import LocalSteps, parse
from co2sim.strategies.local import round_steps
from co2sim.strategies.step import title

CATALOG = FOLDER.parent / "co2sim/catalog/step_factors.toml"
_MIN_SEEDS = 3
"""For a mean that counts; other runs were made to choose by."""

_HEAD = """\
# How many steps of a method are worth one step of DDP; written by `python benchmarks/{script}`.
# factor = steps / ddp_steps: the method ends with the validation loss that DDP has after ddp_steps,
# in a run of the same length, schedule and batch. Each has its own best learning rate; of several
# outer steps the best counts. beta1 is that of AdamW in the local steps. A shorter run of DDP
# would have reached that loss sooner: the true factor is larger. Longer trainings, other models and
# other batches have other factors.
"""


def entries(runs: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """One entry for each budget and strategy, of its best outer step; peers have no strategy."""
    beta1 = {line.name: line.momentum for line in configurations()}
    whole = runs[["validation_loss", "strategy"]].notna().all(axis=1)
    runs = runs[whole & (runs["seed"] != TUNING_SEED)]
    for budget, group in runs.groupby("budget"):
        steps, batch = map(int, str(budget).rpartition("-")[2].split("x"))
        curves = [json.loads(text) for text in group.loc[group["strategy"] == "ddp", "curve"]]
        points = np.array(curves)  # seed, validation, (characters, loss)
        losses = points[:, :, 1].mean(axis=0)
        lengths = points[0, :, 0] / points[0, -1, 0] * steps
        best: dict[str, tuple[float, str, int, str]] = {}
        others = group[group["strategy"] != "ddp"].fillna({"outer": ""})
        for (strategy, outer), same in others.groupby(["strategy", "outer"]):
            name = str(same["configuration"].iloc[0])
            line = mean(same["validation_loss"]), str(outer), len(same), name
            if line[2] >= _MIN_SEEDS and line < best.get(strategy, (np.inf, "", 0, "")):
                best[strategy] = line
        facts = json.loads(group["facts"].iloc[0])
        for strategy in sorted(best, key=lambda text: (parse(text).name, _tau(text))):
            loss, outer, seeds, name = best[strategy]
            worth = float(np.interp(-loss, -losses, lengths))
            yield {
                "strategy": title(parse(strategy)),
                "factor": round(steps / worth, 2),
                "loss": round(loss, 4),
                "ddp_steps": round(worth),
                "steps": steps,
                "batch": batch,
                "workers": Budget().workers,
                "seeds": seeds,
                "outer": outer,
                "beta1": beta1[name],
                "parameters": facts["parameters"],
                "source": f"benchmarks/results/{RUNS}, {budget}",
            }


def _tau(text: str) -> int:
    strategy = parse(text)
    return round_steps(strategy) if isinstance(strategy, LocalSteps) else 1


def main() -> int:
    """Read the runs, write the catalog, print a table."""
    options = parser(__doc__, "prints what it would write").parse_args()
    factors = list(entries(pd.read_csv(RESULTS / RUNS)))
    if options.out or not options.quick:
        parts = [
            "\n".join(["[[factor]]", *(f"{key} = {json.dumps(x)}" for key, x in factor.items())])
            for factor in factors
        ]
        head = _HEAD.format(script=Path(__file__).name).rstrip()
        path = options.out / CATALOG.name if options.out else CATALOG
        path.write_text("\n\n".join([head, *parts]) + "\n")
    shown = ("strategy", "factor", "loss", "ddp_steps", "steps", "seeds", "outer")
    print(table([{name: str(factor[name]) for name in shown} for factor in factors]))
    print(f"\n{made_by()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
