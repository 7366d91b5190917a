"""The group that holds ZeRO++'s secondary shard: memory against time, on three clusters.

    python benchmarks/hpz_group.py            # seconds
    python benchmarks/hpz_group.py --quick    # one cluster

Writes hpz_group.md and hpz_group.png.
"""

from collections.abc import Iterator
from functools import partial

from matplotlib.figure import Figure
from reports import legend_below, made_by, parser, png, publish, table

import co2sim
from co2sim import Result
from co2sim.common.plots import COLOURS
from co2sim.common.units import scaled
from realrun.train.log import MARKERS

CLUSTERS = ("a100-tcp80", "a100-roce800", "dgx-h100")
MODEL, GPUS = "llama3-8b", 64
GROUPS = {
    "a quarter of a node": 2,
    "half a node": 4,
    "a node": 8,
    "two nodes": 16,
    "none (hpz=false)": 0,
}
"""All nodes of these clusters have 8 GPUs."""


Point = tuple[str, str, float, Result]
"""A cluster, a group, bytes of the secondary shard on a GPU, and what that costs."""


def points(clusters: tuple[str, ...]) -> Iterator[Point]:
    """All groups on all clusters."""
    for cluster in clusters:
        for group, ranks in GROUPS.items():
            strategy = f"zeropp(hpz_group={ranks})" if ranks else "zeropp(hpz=false)"
            result = co2sim.simulate(
                cluster, MODEL, strategy, gpus=GPUS, micro_batch=1, accumulation=1
            )
            yield cluster, group, result.memory_bytes_per_gpu.get("secondary", 0.0), result


def main() -> None:
    """Simulate, and write the table and the figure."""
    options = parser(__doc__, "one cluster").parse_args()
    found = list(points(CLUSTERS[:1] if options.quick else CLUSTERS))
    rows = [
        {
            "cluster": cluster,
            "group": group,
            "secondary shard": scaled(secondary, "B"),
            "memory of a GPU": scaled(result.memory_bytes_per_gpu["total"], "B"),
            "step": scaled(result.step_time_s, "s"),
            "of it exposed": scaled(result.exposed_comm_s, "s"),
        }
        for cluster, group, secondary, result in found
    ]
    text = f"""\
# The group of ZeRO++'s secondary shard

{MODEL} on {GPUS} GPUs in nodes of 8, micro-batch 1, simulated. Backward gathers stay inside the
group; each GPU keeps a part of a whole half-precision copy there, the larger the smaller the group.

{table(rows)}

{made_by()}
"""
    picture = png((3.7 * len({cluster for cluster, *_ in found}), 3.4), partial(draw, found))
    publish(options, "hpz_group", text, picture)


def draw(found: list[Point], figure: Figure) -> None:
    """A panel for each cluster: step time over the bytes of the shard."""
    clusters = list(dict.fromkeys(cluster for cluster, *_ in found))
    panels = figure.subplots(1, len(clusters), squeeze=False)[0]
    for axes, cluster in zip(panels, clusters, strict=True):
        mine = [point for point in found if point[0] == cluster]
        line = [(secondary / 1e9, result.step_time_s) for *_, secondary, result in mine]
        axes.plot(*zip(*line, strict=True), color=COLOURS[0], linewidth=1)
        for index, (point, ends) in enumerate(zip(mine, line, strict=True)):
            look = {"color": COLOURS[index], "marker": MARKERS[index], "ls": "none"}
            axes.plot(*ends, **look, label=point[1])
        axes.set(title=cluster, xlabel="secondary shard, GB per GPU", xlim=(-0.3, None))
        axes.set_ylim(0, 1.1 * max(time for _, time in line))
    panels[0].set_ylabel("step time, s")
    legend_below(figure, panels[0], 5)
    figure.suptitle(f"{MODEL} on {GPUS} GPUs: ZeRO++ by the group of its secondary shard")


if __name__ == "__main__":
    main()
