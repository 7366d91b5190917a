"""Tables of candidates."""

from collections.abc import Sequence

from rich.console import Console

from co2sim.console.tables import print_table
from co2sim.decide.wanted import Candidate
from co2sim.grid import label
from co2sim.units import number


def print_options(out: Console, title: str, options: Sequence[Candidate]) -> None:
    """A row for each, with days, GPU-hours, and money and energy where they are known."""
    if not options:
        return
    money = options[0].totals.currency
    energy = any(option.totals.energy_kwh is not None for option in options)
    columns = [
        "cluster",
        "strategy",
        "recompute",
        "GPUs",
        "micro-batch",
        "days",
        "90 %",
        "GPU-hours",
    ]
    columns += [money] if money else []
    columns += ["MWh"] if energy else []
    rows = []
    for option in options:
        total, case = option.totals, option.case
        ends = (total.days_low, total.days_high)
        row = [
            *(label(case.cluster), option.result.strategy, case.recompute),
            *(f"{option.result.gpus:,}", f"{case.micro_batch} x {option.result.accumulation}"),
            f"{total.days:,.3g}",
            "-" if None in ends else " to ".join(f"{end:,.3g}" for end in ends),
            f"{total.gpu_hours:,.0f}",
        ]
        row += [f"{total.cost:,.0f}"] if money else []
        row += ["-" if total.energy_kwh is None else number(total.energy_kwh / 1000)] * energy
        rows.append(row)
    print_table(out, title, columns, rows, left=3)
