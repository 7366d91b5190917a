"""`co2sim.plot`: a chart of a result, a trace, a schedule or a table, for a notebook."""

from typing import TYPE_CHECKING

from co2sim.common.errors import OptionError
from co2sim.common.validation import whole
from co2sim.prediction.result import Result
from co2sim.report.bundle import check_installed
from co2sim.schedule.schedule import Schedule
from co2sim.simulation.trace import Trace

if TYPE_CHECKING:
    import altair as alt
    import pandas as pd


def plot(
    shown: "Result | Trace | Schedule | pd.DataFrame",
    y: str = "tokens_per_s",
    x: str | None = None,
    *,
    schedule: Schedule | None = None,
    rank: int | None = None,
    first: int = 40,
) -> "alt.Chart | alt.LayerChart | alt.VConcatChart":
    """An Altair chart. A notebook shows it, and `chart.save("chart.svg")` keeps it.

    A result: what a round is spent on, and the memory of a GPU by item. A trace: the timeline of
    the last round on a rank. A schedule: its first ops in order of issue, by stream, and what waits
    for what, without times. A table: a line for each configuration.

    Args:
        shown: A `Result`, `Trace` or `Schedule`, or a table of `sweep` or `scale` or some of its
            rows; at most 5,000. Rows with an `error` are left out, and counted below the title.
        y: Of a table: a column of numbers, such as "memory_total_bytes". Where the table has its
            interval (`y_low` and `y_high`), it is drawn as a band.
        x: Of a table: a column; default: `gpus` if these differ, else the path that was varied last
            and that differs. What else differs makes its own line.
        schedule: Of a trace: its schedule.
        rank: Of a trace: a traced rank; default: the first.
        first: Of a schedule: how many ops, 1 to 500.

    Raises:
        OptionError: for a column, rank or number that is not there, or another schedule than that
            of the trace, or without the extra `report`.
    """
    check_installed()
    from co2sim.report import notebook  # noqa: PLC0415 - Altair is optional

    if isinstance(shown, Result):
        return notebook.of_result(shown)
    if isinstance(shown, Trace):
        if schedule is None:
            raise OptionError("a trace is drawn with its schedule: plot(trace, schedule=schedule)")
        return notebook.of_trace(shown, schedule, rank)
    if isinstance(shown, Schedule):
        return notebook.of_schedule(shown, whole("first", first, 1, 500))
    return notebook.of_frame(shown, y, x)
