"""The figures of a configuration, simulated or measured, on the terminal."""

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape

from co2sim.console.tables import console, print_table
from co2sim.result import Result
from co2sim.units import duration, scaled


def print_result(result: Result, *, measured: bool = False) -> None:
    """All figures of one configuration, simulated or measured."""
    out = console()
    r = result
    batch = f"micro-batch {r.micro_batch}" + (f" x {r.accumulation}" if r.accumulation > 1 else "")
    where = f"{r.gpus} GPUs on {r.nodes} nodes of {escape(r.cluster)}"
    out.print(f"[bold]{escape(r.strategy)}[/] on {where}")
    batch += f": {r.tokens_per_gpu_per_step:,} {r.unit}s per GPU and step"
    out.print(f"{escape(r.model)}, {batch}, {r.precision}\n", highlight=False)
    overlap = "no communication" if r.overlap_ratio is None else f"{r.overlap_ratio:.1%}"
    steps = f" ({r.steps_per_round} steps)" if r.steps_per_round > 1 else ""
    rows = [
        ("round time", duration(r.round_time_s) + steps),
        ("step time", duration(r.step_time_s)),
        (f"{r.unit}s/s", f"{r.tokens_per_s:,.0f}"),
        (f"{r.unit}s/s per GPU", f"{r.tokens_per_s_per_gpu:,.1f}"),
        ("model TFLOP/s per GPU", f"{r.model_tflops_per_gpu:.1f}"),
        ("hardware TFLOP/s per GPU", f"{r.hardware_tflops_per_gpu:.1f}"),
        ("MFU", f"{r.mfu:.1%}"),
        ("communication busy, per round", duration(r.comm_busy_s)),
        (
            "communication exposed, per round",
            f"{duration(r.exposed_comm_s)} ({r.exposed_share:.1%})",
        ),
        ("overlap ratio", overlap),
        ("sent per GPU and step", scaled(r.wire_bytes_per_gpu_per_step, "B")),
        ("sent per node's NICs and step", scaled(r.nic_bytes_per_node_per_step, "B")),
    ]
    if r.waiting_s:
        rows.insert(9, ("waiting for slower ranks, per round", duration(r.waiting_s)))
    if r.wan_bytes_per_site_per_step:
        rows.append(
            ("sent per site over the WAN and step", scaled(r.wan_bytes_per_site_per_step, "B"))
        )
    if r.usd_per_billion_tokens is not None:
        rows.append((f"USD per billion {r.unit}s", f"{r.usd_per_billion_tokens:,.2f}"))
    print_table(out, "figures", ("figure", "value"), rows)
    if measured:
        out.print(f"measured: averages over the last of {r.rounds_simulated} rounds")
    elif not r.steady:
        out.print(f"not a steady state: averaged over the last of {r.rounds_simulated} rounds")
    breakdown = [(name, duration(value)) for name, value in r.breakdown_s.items()]
    print_table(
        out,
        "spans of the last round on one rank, by work (overlapping, waiting included)",
        ("work", "time"),
        breakdown,
    )
    memory = [(name, scaled(value, "B")) for name, value in r.memory_bytes_per_gpu.items()]
    fits = "fits" if r.fits_in_memory else "DOES NOT FIT"
    title = f"memory per GPU: {fits} in {scaled(r.gpu_memory_bytes, 'B')}"
    print_table(out, title, ("item", "size"), memory)
    print_assumed(out, [result])


def print_assumed(out: Console, results: Iterable[Result]) -> None:
    """The inputs that no source supports, once each."""
    found = dict.fromkeys(fact for result in results for fact in result.assumed)
    if found:
        rows = [(fact.path, fact.value, fact.source.removeprefix("assumed: ")) for fact in found]
        print_table(
            out, "assumed, not measured or published", ("number", "value", "why"), rows, left=3
        )
