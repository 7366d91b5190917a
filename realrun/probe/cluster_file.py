"""The result of a probe as a cluster file: every number with its unit and its source."""

from dataclasses import asdict
from typing import Any

import tomlkit
from tomlkit.items import InlineTable

from co2sim.common.units import Bytes, Unit
from co2sim.hardware.cluster import GPU, Link, TokenBucket
from realrun.probe.fit import Fitted, Measured, interference

_SLEEPS = "virtual"
"""The GPU of the catalog that stands for sleep kernels."""

_SHARED = 1.5
"""Kernels of two streams that share a processor take twice as long as those of one, others once."""

_PREFIXES = ("n", "u", "m", "", "k", "M", "G", "T", "P")


def to_toml(measured: Measured, fitted: Fitted, name: str, gpu: str | None = None) -> str:
    """The text of the file; `gpu` is the catalog's name of the one to state if none was measured.

    There must be something to state: a processor or a link.
    """
    first = "# Written by `realrun probe`. Predict with it: co2sim run --cluster THIS_FILE ...\n"
    return first + tomlkit.dumps(_cluster(measured, fitted, name, gpu))


def quantity(value: float, unit: Unit) -> str:
    """Four significant digits with a prefix: 118213004.5, "B/s" -> "118.2 MB/s"."""
    value = float(f"{value:.4g}")
    if not value:
        return f"0 {unit}"
    prefix = next(
        (p for p in range(len(_PREFIXES)) if value < 1000.0 ** (p - 2)), len(_PREFIXES) - 1
    )
    factor = 1000.0 ** (prefix - 3)
    return f"{value / factor:.10g} {_PREFIXES[prefix]}{unit}"


def _fact(value: object, source: str, *, assumed: bool = False) -> InlineTable:
    """A value with its source; numbers have three significant digits."""
    fact = tomlkit.inline_table()
    fact["value"] = float(f"{value:.3g}") if isinstance(value, float) else value
    fact["source"] = source
    if assumed:
        fact["assumed"] = True
    return fact


def _cluster(measured: Measured, fitted: Fitted, name: str, gpu: str | None) -> dict[str, Any]:
    cluster = {
        "name": name,
        "source": f"measured by realrun probe on {measured.machine}",
        "nodes": measured.layout.nodes,
        "gpus_per_node": measured.layout.gpus_per_node,
        "backend": measured.backend,
        "communicators": _fact("stream", "realrun makes a communicator for every stream and group"),
        "interference": _interference(measured, kernels=fitted.processor is not None),
    }
    if fitted.hosts and fitted.hosts.call_overhead:
        source = "fitted to collectives that pass at once with the bursts that the lab states"
        cluster["call_overhead"] = _fact(quantity(fitted.hosts.call_overhead, "s"), source)
    if fitted.processor is not None:
        cluster["gpu"] = _processor(measured, fitted.processor)
    else:
        cluster["gpu"] = _fact(gpu, "stated with --gpu; its kernels were not run by the probe")
    parts = {"host": _host(measured, fitted), **_links(measured, fitted)}
    parts["scatter"] = _scatter(fitted, gpu)
    return cluster | {key: part for key, part in parts.items() if part}


def _host(measured: Measured, fitted: Fitted) -> dict[str, Any]:
    """What cores add: to computes, and in a lab to collectives; nothing where they add nothing."""
    table = _beside_computes(measured)
    host = fitted.hosts and fitted.hosts.host
    if not host:
        return table
    source = "the nodes of a lab are one machine, which serves all collectives in flight"
    table["one_machine"] = _fact(True, source)  # noqa: FBT003 - the value
    if host.wake_up:
        source = "fitted to what passes with bursts: what it takes longer after a pause"
        table["wake_up"] = _fact(quantity(host.wake_up, "s"), source)
        table["fully_idle"] = _fact(quantity(host.fully_idle, "s"), "as the lab states it")
    if host.calls:
        source = "fitted to what passes with bursts: what a call takes longer than the quickest"
        times = [(kind, more) for kind, more in asdict(host.calls).items() if more]
        table["calls"] = {kind: _fact(quantity(more, "s"), source) for kind, more in times}
    for link_name, burst in (("intra", host.intra), ("inter", host.inter)):
        if getattr(fitted, link_name) and burst:
            table[link_name] = _burst(burst)
    return table


def _burst(burst: TokenBucket) -> dict[str, Any]:
    table = {"size": _fact(quantity(burst.size, "B"), "payload, as the lab states it")}
    if burst.bandwidth:
        source = "fitted to collectives that pass with the burst"
        table["bandwidth"] = _fact(quantity(burst.bandwidth, "B/s"), source)
    if burst.lag:
        source = "of the time after the burst: what longer collectives take longer than that"
        table["lag"] = _fact(burst.lag, source)
    return table


def _beside_computes(measured: Measured) -> dict[str, Any]:
    table: dict[str, Any] = {}
    call = interference(measured.slowdowns)[1] if measured.slowdowns else 0.0
    if call:
        why = "from kernels beside all-reduces: what each collective takes besides interference"
        table["call_interference"] = _fact(quantity(call, "s"), why)
    if measured.compute and measured.together is not None:
        ratio = f"{measured.together:.3g} times as long as those of one alone"
        source = f"kernels of two streams of a rank at once take {ratio}"
        table["one_core"] = _fact(measured.together > _SHARED, source)
    return table


def _scatter(fitted: Fitted, gpu: str | None) -> dict[str, Any]:
    """What intervals of predictions come from; nothing where a part of it is not known."""
    passes = "how far the medians of its passes differ"
    compute, why = fitted.compute_scatter, f"standard deviation of the time of a kernel: {passes}"
    if gpu == _SLEEPS:
        compute, why = 0.0, "sleep kernels take the time that is stated"
    if compute is None or fitted.communication_scatter is None:
        return {}
    far = "standard deviation of the time of a collective: how far it is off the links, and"
    return {
        "compute": _fact(compute, why),
        "communication": _fact(fitted.communication_scatter, f"{far} {passes}"),
    }


def _interference(measured: Measured, *, kernels: bool) -> InlineTable:
    if measured.slowdowns:
        beside = " and ".join(
            f"{slowdown.compute:.3g} beside those of {quantity(slowdown.seconds, 's')}"
            for slowdown in measured.slowdowns
        )
        source = f"times as long as a kernel takes beside all-reduces of its rank: {beside}"
        return _fact(interference(measured.slowdowns)[0], source)
    if kernels:
        source = "not measured: a single rank has no other to communicate with"
        return _fact(0, source, assumed=True)
    source = "not measured: no kernel was run (--gpu)"
    if measured.backend == "gloo":
        return _fact(0, f"{source}; kernels that sleep use no processor")
    return _fact(0, source, assumed=True)


def _processor(measured: Measured, gpu: GPU) -> dict[str, Any]:
    first = next(iter(gpu.peak))
    best = "the best speed that the kernel attained at any size"
    like_first = f"{best}; the efficiencies by size are those of {first}"
    largest = max(sample.work.memory_bytes for sample in measured.copies)
    ranks = measured.layout.gpus_per_node
    shared = f"memory of a node / its number of ranks, {ranks}"
    return {
        "name": gpu.name,
        **({"generation": gpu.generation} if gpu.generation else {}),
        "source": "measured by realrun probe, on all ranks of a node at once",
        "memory": _fact(
            quantity(gpu.memory, "B"),
            shared if measured.backend == "gloo" else "memory of the GPU",
        ),
        "memory_bandwidth": _fact(
            quantity(gpu.memory_bandwidth, "B/s"),
            f"attained by the kernel that moves memory, {quantity(largest, 'B')} in all",
        ),
        "memory_efficiency": _fact(1.0, "the bandwidth is what was attained"),
        "launch_overhead": _fact(
            quantity(gpu.launch_overhead, "s"),
            "time of an empty op",
        ),
        "peak": {
            precision: _fact(quantity(speed, "FLOP/s"), best if precision == first else like_first)
            for precision, speed in gpu.peak.items()
        },
        "efficiency": [
            {"flops": quantity(flops, "FLOP"), "value": min(1.0, float(f"{value:.4g}"))}
            for flops, value in gpu.efficiency
        ],
    }


def _links(measured: Measured, fitted: Fitted) -> dict[str, Any]:
    fits = ""
    if fitted.overall is not None:
        sizes = sorted({sample.work.bytes for sample in measured.collectives})
        fits = (
            f"fitted to {len(measured.collectives)} collectives of {size_text(sizes[0])} to"
            f" {size_text(sizes[-1])}; half of them are off by less than"
            f" {fitted.overall.median:.0%}, the worst by {fitted.overall.worst:.0%}"
        )
    why = {
        "intra": "not measured, since a node has one rank: taken from [inter]",
        "inter": "not measured, since there is one node: taken from [intra]",
    }
    other = fitted.intra or fitted.inter
    if other is None:
        assert fitted.processor is not None
        other = Link(fitted.processor.memory_bandwidth)
        why = dict.fromkeys(why, "not measured, since there is one rank: as fast as memory")
    tables: dict[str, Any] = {}
    for link_name, link in (("intra", fitted.intra), ("inter", fitted.inter)):
        source = fits if link else why[link_name]
        rate = "what payload gets of the rate that the lab states" if fitted.stated else source
        rate = f"payload, {rate}" if link and not fitted.stated else rate
        bandwidth, latency = (link or other).bandwidth, (link or other).latency
        tables[link_name] = table = {
            "bandwidth": _fact(quantity(bandwidth, "B/s"), rate, assumed=link is None),
            "latency": _fact(quantity(latency, "s"), source, assumed=link is None),
        }
        if link_name == "inter" and link and measured.slowdowns:
            times = measured.slowdowns[-1].communication
            source = (
                f"an all-reduce takes {times:.3g} times as long while kernels run at the same time"
            )
            table["busy_efficiency"] = _fact(min(1.0, 1 / times), source)
    return tables


def size_text(size: Bytes) -> str:
    """16777216.0 -> "16 MiB"."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size:.4g} B"
