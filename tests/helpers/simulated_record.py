"""Records of runs that were simulated on another cluster than they say."""

from collections.abc import Callable
from dataclasses import replace

from co2sim.catalog import load_cluster, load_model
from co2sim.hardware.cluster import Cluster
from co2sim.prediction import measure
from co2sim.prediction.question import Question
from co2sim.simulation.noise import QUIET, Noise
from co2sim.simulation.run import execute
from realrun.record import Record

Change = Callable[[Cluster], Cluster]


def same(cluster: Cluster) -> Cluster:
    """No change."""
    return cluster


def slower_network(cluster: Cluster) -> Cluster:
    """A third of the bandwidth between nodes."""
    return replace(cluster, inter=replace(cluster.inter, bandwidth=cluster.inter.bandwidth / 3))


def more_latency(cluster: Cluster) -> Cluster:
    """Ten times the latency everywhere."""
    inter, intra = (
        replace(link, latency=10 * link.latency) for link in (cluster.inter, cluster.intra)
    )
    return replace(cluster, inter=inter, intra=intra)


def more_launch(cluster: Cluster) -> Cluster:
    """Each op costs 20 us more to launch."""
    gpu = replace(cluster.gpu, launch_overhead=cluster.gpu.launch_overhead + 2e-5)
    return replace(cluster, gpu=gpu)


def slower_gpu(cluster: Cluster) -> Cluster:
    """70 % of the arithmetic and of the memory bandwidth."""
    peak = {precision: 0.7 * speed for precision, speed in cluster.gpu.peak.items()}
    memory = 0.7 * cluster.gpu.memory_bandwidth
    return replace(cluster, gpu=replace(cluster.gpu, peak=peak, memory_bandwidth=memory))


def disturbed(cluster: Cluster) -> Cluster:
    """Communication slows compute down by 30 %."""
    return replace(cluster, interference=0.3)


def measured(strategy: str, change: Change = same, noise: Noise = QUIET, rounds: int = 2) -> Record:
    """A record whose measurement is a simulation on another cluster than the record says."""
    dgx = load_cluster(
        "dgx-h100", {"interference": "0", "node_spread": "0", "inter.ring_loss": "0"}
    ).value
    plain = replace(dgx.gpu, products=None, efficiency=((1e12, 0.4),))  # each op takes its launch
    cluster = replace(dgx, gpu=plain, nodes=2, gpus_per_node=2, protocols="simple")
    model = load_model("gpt2-small", {}).value
    case = Question(cluster=cluster, model=model, strategy=strategy, precision="bf16")
    prepared = case.stage()
    other, whole = change(cluster), rounds + 2

    found = execute(
        prepared.schedule, other, precision="bf16", rounds=whole, noise=noise, fold=False
    )
    return Record(
        case=case,
        kernels="simulated",
        rounds=rounds,
        trace=found,
        clock_error=0.0,
        figures=measure.measured(prepared, found, rounds, steady=True).to_dict(),
        environment={"host": "none"},
    )
