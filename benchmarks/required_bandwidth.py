"""The bandwidth that a compute utilization needs: `co2sim solve` beside published tables.

    python benchmarks/required_bandwidth.py            # half a minute
    python benchmarks/required_bandwidth.py --quick    # one model

Reads papers/bandwidths.toml, and writes benchmarks/results/required_bandwidth.md.
"""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reports import folder, made_by, parser, table

from co2sim import GPU, Block, Case, Cluster, Link, Model
from co2sim.decide.axis import axis_of
from co2sim.decide.solve import solve
from co2sim.decide.targets import Target

PUBLISHED = Path(__file__).parent.parent / "papers" / "bandwidths.toml"
GRID = 10 ** (4 / 49)
"""A step of the published grid."""

_FREE = 1e18
"""A speed that adds nothing."""
_LOCAL_STEPS = 100
_TOKENS = 2**20
"""Of a batch: so many that an optimizer's step takes no time beside the two passes."""


def main() -> None:
    """Solve for all, and write the table."""
    given = parser(__doc__, "one model").parse_args()
    published = tomllib.loads(PUBLISHED.read_text("utf-8"))
    rows = [
        row
        for source in published["source"][: 1 if given.quick else None]
        for each in source["row"][: 2 if given.quick else None]
        for row in compared(source, each, published["conditions"])
    ]
    near = sum(row["within a step of the grid"] == "yes" for row in rows)
    text = f"""\
# The bandwidth that a compute utilization needs

Two workers of one GPU, the model in equal layers, 2 bytes per parameter and gradient, no latency.
Computation takes the published step time, a third of it the forward pass. Data parallel: gradients
of a layer travel behind the backward pass of the layers before it (`ddp` with a bucket for each
layer). DiLoCo: {_LOCAL_STEPS} local steps, then an average that all wait for. One step of the
published grid is a factor of {GRID:.3f}: {near} of {len(rows)} are within one.

{table(rows)}

In the published simulation the average of DiLoCo, too, travels behind a backward pass; in ours it
begins when the round has ended. That matters most where little may be exposed.

{made_by()}
"""
    with folder(given) as out:
        (out / "required_bandwidth.md").write_text(text, "utf-8")
        print(text)


def compared(
    source: Mapping[str, Any], row: Mapping[str, Any], conditions: Mapping[str, Any]
) -> Iterator[dict[str, str]]:
    """A row of the table for each utilization."""
    case = case_of(row, conditions)
    axis = axis_of(case, "inter.bandwidth", "0.05 Gbit/s", "5000 Gbit/s")
    answers = solve(case, axis, Target("utilization", tuple(source["utilization"]))).answers
    for answer, bandwidth in zip(answers, row["bandwidth"], strict=True):
        ours = answer.met[0].low * 8 / 1e9
        ratio = ours / bandwidth
        yield {
            "source": source["key"],
            "parameters": f"{row['parameters'] / 1e9:g}B",
            "method": row["method"],
            "utilization": f"{answer.value:.0%}",
            "published Gbit/s": f"{bandwidth:g}",
            "co2sim Gbit/s": f"{ours:.4g}",
            "ratio": f"{ratio:.2f}",
            "within a step of the grid": "yes" if 1 / GRID <= ratio <= GRID else "no",
        }


def case_of(row: Mapping[str, Any], conditions: Mapping[str, Any]) -> Case:
    """The published setting as a case."""
    layers, parameters = row["layers"], round(row["parameters"] / row["layers"])
    forward = 2.0 * parameters * _TOKENS  # the backward pass has twice as much
    blocks = tuple(Block(f"layer{n}", (parameters,), forward, 0.0) for n in range(layers))
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
    strategy = {
        "data parallel": f"ddp:bucket_mib={mebibytes!r}",
        "DiLoCo": f"diloco:tau={_LOCAL_STEPS},dtype=bf16",
    }[row["method"]]
    return Case(cluster=cluster, model=Model("as published", blocks, tokens=1), strategy=strategy)


if __name__ == "__main__":
    main()
