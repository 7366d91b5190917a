"""The bandwidth that a compute utilization needs: `co2sim solve` beside published tables.

    python benchmarks/required_bandwidth.py            # half a minute
    python benchmarks/required_bandwidth.py --quick    # one model

Reads papers/bandwidths.toml, and writes benchmarks/results/required_bandwidth.md.
"""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from reports import made_by, parser, publish, table

from co2sim import GPU, Cluster, Link, Model, Question
from co2sim.models.operators import plain_block
from co2sim.studies.solve import solve
from co2sim.studies.targets import Target, axis_of

PUBLISHED = Path(__file__).parent.parent / "papers" / "bandwidths.toml"
GRID = 10 ** (4 / 49)
"""A step of the published grid."""

_FREE = 1e18
"""A speed that adds nothing."""
_LOCAL_STEPS = 100
_STRATEGIES = {
    "data parallel": {"data parallel": "ddp:bucket_mib={mebibytes}"},
    "DiLoCo": {
        "DiLoCo, waits": f"diloco:tau={_LOCAL_STEPS},dtype=bf16",
        "DiLoCo, delay=1": f"diloco:tau={_LOCAL_STEPS},dtype=bf16,delay=1",
    },
}
"""Strategies that stand for a published method."""
_TOKENS = 2**20
"""Of a batch: enough that an optimizer's step takes no time beside the two passes."""


def main() -> None:
    """Solve for all, and write the table."""
    options = parser(__doc__, "one model").parse_args()
    published = tomllib.loads(PUBLISHED.read_text("utf-8"))
    rows = [
        row
        for source in published["source"][: 1 if options.quick else None]
        for each in source["row"][: 2 if options.quick else None]
        for row in compared(source, each, published["conditions"])
    ]
    counts = pd.DataFrame(rows).groupby("method", sort=False)["within a step of the grid"]
    near = "; ".join(f"{name} {(some == 'yes').sum()} of {len(some)}" for name, some in counts)
    text = f"""\
# The bandwidth that a compute utilization needs

Two workers of one GPU, the model in equal layers, 2 bytes per parameter and gradient, no latency.
Computation takes the published step time, a third of it the forward pass. Data parallel: gradients
of a layer travel behind the backward pass of the layers before it (`ddp` with a bucket for each
layer). DiLoCo: {_LOCAL_STEPS} local steps. In the published simulation its average, too, travels
behind a backward pass, two thirds of a step; we have no schedule that does that. The nearest two
are an average that all wait for, and `delay=1`, which hides it behind a whole step.

One step of the published grid is a factor of {GRID:.3f}. Within one: {near}.

{table(rows)}

{made_by()}
"""
    publish(options, "required_bandwidth", text)


def compared(
    source: Mapping[str, Any], row: Mapping[str, Any], conditions: Mapping[str, Any]
) -> Iterator[dict[str, str]]:
    """A row of the table for each strategy that stands for the method, and each utilization."""
    for name, strategy in _STRATEGIES[row["method"]].items():
        case = case_of(row, conditions, strategy)
        axis = axis_of(case, "inter.bandwidth", "0.05 Gbit/s", "5000 Gbit/s")
        answers = solve(case, axis, Target("utilization", tuple(source["utilization"]))).answers
        for answer, bandwidth in zip(answers, row["bandwidth"], strict=True):
            ours = answer.met[0].low * 8 / 1e9
            ratio = ours / bandwidth
            yield {
                "source": source["key"],
                "parameters": f"{row['parameters'] / 1e9:g}B",
                "method": name,
                "utilization": f"{answer.value:.0%}",
                "published Gbit/s": f"{bandwidth:g}",
                "co2sim Gbit/s": f"{ours:.4g}",
                "ratio": f"{ratio:.2f}",
                "within a step of the grid": "yes" if 1 / GRID <= ratio <= GRID else "no",
            }


def case_of(row: Mapping[str, Any], conditions: Mapping[str, Any], strategy: str) -> Question:
    """The published setting as a case; `{mebibytes}` of a strategy are those of a layer."""
    layers, parameters = row["layers"], round(row["parameters"] / row["layers"])
    forward = 2.0 * parameters * _TOKENS  # the backward pass has twice as much
    blocks = tuple(plain_block(f"layer{n}", (parameters,), forward, 0.0) for n in range(layers))
    speed = 3.0 * layers * forward / row["step"]
    gpu = GPU("as published", 1e18, _FREE, {"bf16": speed}, ((1.0, 1.0),))
    cluster = Cluster(
        name="two workers",
        gpu=gpu,
        nodes=conditions["workers"],
        gpus_per_node=1,
        intra=Link(_FREE),
        inter=Link(1e9),
        all_reduce="ring",
    )
    mebibytes = parameters * conditions["bytes"] / 2**20
    model = Model("as published", blocks, tokens=1)
    return Question(
        cluster=cluster, model=model, strategy=strategy.format(mebibytes=repr(mebibytes))
    )


if __name__ == "__main__":
    main()
