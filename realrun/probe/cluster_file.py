"""The result of a probe as a cluster file: every number with its unit and its source."""

import json
from collections.abc import Iterator
from dataclasses import asdict

from co2sim.common.errors import OptionError
from co2sim.common.units import Bytes, Unit, duration
from co2sim.hardware.cluster import GPU, Link, TokenBucket
from realrun.probe.fit import Fitted, Measured, interference

NOTHING = (
    "nothing can be measured: a single rank has no other to communicate with, and --gpu leaves out"
    " kernels"
)

_SLEEPS = "virtual"
"""The GPU of the catalog that stands for sleep kernels."""

_SHARED = 1.5
"""Kernels of two streams that share a processor take twice as long as those of one, others once."""

_PREFIXES = ("n", "u", "m", "", "k", "M", "G", "T", "P")


def to_toml(measured: Measured, fitted: Fitted, name: str, gpu: str | None = None) -> str:
    """The text of the file; `gpu` is the catalog's name of the one to state if none was measured.

    Raises OptionError when there is nothing to state: neither a processor nor a link.
    """
    return "\n".join(_lines(measured, fitted, name, gpu)) + "\n"


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


def _lines(measured: Measured, fitted: Fitted, name: str, gpu: str | None) -> Iterator[str]:
    yield "# Written by `realrun probe`. Predict with it: co2sim run --cluster THIS_FILE ..."
    yield f"name = {_text(name)}"
    yield f"source = {_text(f'measured by realrun probe on {measured.machine}')}"
    yield f"nodes = {measured.layout.nodes}"
    yield f"gpus_per_node = {measured.layout.gpus_per_node}"
    yield f"backend = {_text(measured.backend)}"
    yield _fact(
        "communicators",
        _text("stream"),
        "realrun makes a communicator for every stream and group",
    )
    yield from _interference(measured, kernels=fitted.processor is not None)
    if fitted.hosts and fitted.hosts.call_overhead:
        source = "fitted to collectives that pass at once with the bursts that the lab states"
        yield _fact("call_overhead", _text(quantity(fitted.hosts.call_overhead, "s")), source)
    if fitted.processor is None:
        if gpu is None:
            raise OptionError("no kernel was run: name a GPU of the catalog with --gpu")
        yield _fact("gpu", _text(gpu), "stated with --gpu; its kernels were not run by the probe")
    else:
        yield from _processor(measured, fitted.processor)
    yield from _host(measured, fitted)
    yield from _links(measured, fitted)
    yield from _scatter(fitted, gpu)


def _host(measured: Measured, fitted: Fitted) -> Iterator[str]:
    """What cores add: to computes, and in a lab to collectives; nothing where they add nothing."""
    facts, tables = list(_beside_computes(measured)), list[str]()
    host = fitted.hosts and fitted.hosts.host
    if host:
        source = "the nodes of a lab are one machine, which serves all collectives in flight"
        facts.append(_fact("one_machine", "true", source))
        if host.wake_up:
            source = "fitted to what passes with bursts: what it takes longer after a pause"
            facts.append(_fact("wake_up", _text(quantity(host.wake_up, "s")), source))
            idle = _text(quantity(host.fully_idle, "s"))
            facts.append(_fact("fully_idle", idle, "as the lab states it"))
        if host.calls:
            source = "fitted to what passes with bursts: what a call takes longer than the quickest"
            times = [(kind, more) for kind, more in asdict(host.calls).items() if more]
            calls = [_fact(kind, _text(quantity(more, "s")), source) for kind, more in times]
            tables += ["", "[host.calls]", *calls]
        for link_name, burst in (("intra", host.intra), ("inter", host.inter)):
            if getattr(fitted, link_name) and burst:
                tables += ["", f"[host.{link_name}]", *_burst(burst)]
    if facts or tables:
        yield from ["", "[host]", *facts, *tables]


def _burst(burst: TokenBucket) -> Iterator[str]:
    yield _fact("size", _text(quantity(burst.size, "B")), "payload, as the lab states it")
    if burst.bandwidth:
        value = _text(quantity(burst.bandwidth, "B/s"))
        yield _fact("bandwidth", value, "fitted to collectives that pass with the burst")
    if burst.lag:
        source = "of the time after the burst: what longer collectives take longer than that"
        yield _fact("lag", f"{burst.lag:.3g}", source)


def _beside_computes(measured: Measured) -> Iterator[str]:
    call = interference(measured.slowdowns)[1] if measured.slowdowns else 0.0
    if call:
        why = "from kernels beside all-reduces: what each collective takes besides interference"
        yield _fact("call_interference", _text(quantity(call, "s")), why)
    if measured.compute and measured.together is not None:
        ratio = f"{measured.together:.3g} times as long as those of one alone"
        source = f"kernels of two streams of a rank at once take {ratio}"
        yield _fact("one_core", str(measured.together > _SHARED).lower(), source)


def _scatter(fitted: Fitted, gpu: str | None) -> Iterator[str]:
    """What intervals of predictions come from; nothing where a part of it is not known."""
    passes = "how far the medians of its passes differ"
    compute, why = fitted.compute_scatter, f"standard deviation of the time of a kernel: {passes}"
    if gpu == _SLEEPS:
        compute, why = 0.0, "sleep kernels take the time that is stated"
    if compute is None or fitted.communication_scatter is None:
        return
    yield ""
    yield "[scatter]"
    yield _fact("compute", f"{compute:.4f}", why)
    why = "standard deviation of the time of a collective: how far it is off the links, and"
    yield _fact("communication", f"{fitted.communication_scatter:.4f}", f"{why} {passes}")


def _interference(measured: Measured, *, kernels: bool) -> Iterator[str]:
    if measured.slowdowns:
        beside = " and ".join(
            f"{slowdown.compute:.3g} beside those of {quantity(slowdown.seconds, 's')}"
            for slowdown in measured.slowdowns
        )
        source = f"times as long as a kernel takes beside all-reduces of its rank: {beside}"
        value, _ = interference(measured.slowdowns)
        yield _fact("interference", f"{value:.3g}", source)
        return
    if kernels:
        source = "not measured: a single rank has no other to communicate with"
        yield _fact("interference", "0", source, assumed=True)
        return
    source = "not measured: no kernel was run (--gpu)"
    if measured.backend == "gloo":
        yield _fact("interference", "0", f"{source}; kernels that sleep use no processor")
        return
    yield _fact("interference", "0", source, assumed=True)


def _processor(measured: Measured, gpu: GPU) -> Iterator[str]:
    first = next(iter(gpu.peak))
    yield ""
    yield "[gpu]"
    yield f"name = {_text(gpu.name)}"
    if gpu.generation:
        yield f"generation = {_text(gpu.generation)}"
    yield f"source = {_text('measured by realrun probe, on all ranks of a node at once')}"
    yield _fact(
        "memory",
        _text(quantity(gpu.memory, "B")),
        f"memory of a node / its number of ranks, {measured.layout.gpus_per_node}"
        if measured.backend == "gloo"
        else "memory of the GPU",
    )
    largest = max(sample.work.memory_bytes for sample in measured.copies)
    yield _fact(
        "memory_bandwidth",
        _text(quantity(gpu.memory_bandwidth, "B/s")),
        f"attained by the kernel that moves memory, {quantity(largest, 'B')} in all",
    )
    yield _fact("memory_efficiency", "1.0", "the bandwidth is what was attained")
    yield _fact(
        "launch_overhead",
        _text(quantity(gpu.launch_overhead, "s")),
        "time of an empty op; waiting for another stream takes"
        f" {duration(measured.handover)} more, which is not in here",
    )
    yield ""
    yield "[gpu.peak]"
    for precision, speed in gpu.peak.items():
        source = "the best speed that the kernel attained at any size"
        if precision != first:
            source += f"; the efficiencies by size are those of {first}"
        yield _fact(precision, _text(quantity(speed, "FLOP/s")), source)
    for flops, value in gpu.efficiency:
        yield ""
        yield "[[gpu.efficiency]]"
        yield f"flops = {_text(quantity(flops, 'FLOP'))}"
        yield f"value = {min(1.0, float(f'{value:.4g}'))}"


def _links(measured: Measured, fitted: Fitted) -> Iterator[str]:
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
        if fitted.processor is None:
            raise OptionError(NOTHING)
        other = Link(fitted.processor.memory_bandwidth)
        why = dict.fromkeys(why, "not measured, since there is one rank: as fast as memory")
    for link_name, link in (("intra", fitted.intra), ("inter", fitted.inter)):
        yield ""
        yield f"[{link_name}]"
        source = fits if link else why[link_name]
        rate = "what payload gets of the rate that the lab states" if fitted.stated else source
        yield _fact(
            "bandwidth",
            _text(quantity((link or other).bandwidth, "B/s")),
            f"payload, {rate}" if link and not fitted.stated else rate,
            assumed=link is None,
        )
        yield _fact(
            "latency", _text(quantity((link or other).latency, "s")), source, assumed=link is None
        )
        if link_name == "inter" and link and measured.slowdowns:
            times = measured.slowdowns[-1].communication
            source = (
                f"an all-reduce takes {times:.3g} times as long while kernels run at the same time"
            )
            yield _fact("busy_efficiency", f"{min(1.0, 1 / times):.3g}", source)


def size_text(size: Bytes) -> str:
    """16777216.0 -> "16 MiB"."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size:.4g} B"


def _text(text: str) -> str:
    """A basic string of TOML: JSON writes the same."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _fact(key: str, value: str, source: str, *, assumed: bool = False) -> str:
    mark = ", assumed = true" if assumed else ""
    return f"{key} = {{ value = {value}, source = {_text(source)}{mark} }}"
