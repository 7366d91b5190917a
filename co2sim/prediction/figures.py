"""The figures of a result that tables show, declared once: name, heading, words, text, tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from co2sim.common.units import counted, duration, figures, scaled
from co2sim.prediction.result import Result

INTERVAL = "90 % interval"


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure: its `column` in CSV and JSON, its `heading` in tables, its `words` for one result.

    `shown` is its text, None where a result has none. `tables` have it as a column: "sweep", "page"
    (of a study), or "run", the list of one result, which may say more: `at_length`. A heading or
    words may name the {unit} that is processed, and the {currency}. A column behind a "-" falls
    where the figure rises.
    """

    column: str
    words: str
    shown: Callable[[Result], str | None]
    tables: frozenset[str] = frozenset({"run"})
    heading: str = ""
    at_length: Callable[[Result], str | None] | None = None

    def headed(self, result: Result) -> str:
        """The heading in a table of results such as this one."""
        return self.heading.format(unit=result.unit, currency=result.currency)

    def listed(self, result: Result) -> tuple[str, str] | None:
        """The words and the text in the list of one result."""
        text = (self.at_length or self.shown)(result)
        words = self.words.format(unit=result.unit, currency=result.currency)
        return None if text is None else (words, text)


_EVERYWHERE = frozenset({"run", "sweep", "page"})
_IN_TABLES = frozenset({"run", "sweep"})


def ends(result: Result) -> str:
    """The ends of the interval, in units per second of all GPUs; a dash for none."""
    low, high = result.tokens_per_s_low, result.tokens_per_s_high
    return "-" if low is None or high is None else f"{low:,.0f} to {high:,.0f}"


def shared_batch(results: Sequence[Result], *, whole: bool = True) -> str:
    """The batch that all results have: of a GPU, or of all GPUs; or that they differ.

    With its tokens where it is `whole`.
    """
    first = results[0]
    if len({r.global_batch for r in results}) == 1 and first.global_batch:
        if whole:
            return f"{whole_batch(first)} per step"
        each = first.tokens_per_gpu_per_step * first.gpus / first.global_batch
        tokens = f" of {each:,.0f} tokens" if first.unit == "token" else ""
        return f"{counted(first.global_batch, 'sample')}{tokens}"
    if len({r.tokens_per_gpu_per_step for r in results}) == 1:
        return f"{counted(first.tokens_per_gpu_per_step, first.unit)} per GPU and step"
    return "steps of different batches, which are different trainings"


def whole_batch(r: Result) -> str:
    """Samples of a step over all GPUs, with their tokens: `512 samples x 8,192 tokens = ...`."""
    samples = counted(r.global_batch or 0, "sample")
    whole = r.tokens_per_gpu_per_step * r.gpus
    if r.unit != "token" or not r.global_batch:
        return samples
    return f"{samples} x {whole / r.global_batch:,.0f} tokens = {whole:,.0f} tokens"


def asked(r: Result) -> dict[str, Any]:
    """The question that a result answers, for JSON: its batch, precision and stack."""
    names = ("global_batch", "micro_batch", "accumulation", "recompute", "precision", "stack")
    return {name: getattr(r, name) for name in names}


def brief_batch(r: Result) -> str:
    """How GPUs take their samples: micro-batch, micro-steps and recomputation."""
    return f"{r.micro_batch} x {r.accumulation}, {r.recompute}"


def _steps(r: Result) -> str:
    return f" ({r.steps_per_round} steps)" if r.steps_per_round > 1 else ""


def _share(seconds: float, r: Result) -> str:
    return f"{duration(seconds)} ({seconds / r.round_time_s:.1%})"


def _tflops(value: float) -> str:
    """One decimal; three significant figures for tiny models."""
    return f"{value:.1f}" if value >= 10 else figures(value)  # noqa: PLR2004


def _memory(r: Result) -> str:
    return scaled(r.memory_bytes_per_gpu["total"], "B") + ("" if r.fits_in_memory else "*")


def _delay(r: Result) -> str | None:
    return None if r.straggler_delay_s is None else _share(r.straggler_delay_s, r)


def _wan(r: Result) -> str | None:
    sent = r.wan_bytes_per_site_per_step
    return scaled(sent, "B") if sent else None


def _cost(r: Result) -> str | None:
    cost = r.cost_per_billion_tokens
    return None if cost is None else f"{cost:,.2f}"


FIGURES = (
    Figure(
        "tokens_per_s", "{unit}s/s", lambda r: f"{r.tokens_per_s:,.0f}", _EVERYWHERE, "{unit}s/s"
    ),
    Figure(
        "tokens_per_s_low",
        INTERVAL,
        ends,
        _EVERYWHERE,
        INTERVAL,
        lambda r: None if r.tokens_per_s_low is None else ends(r),
    ),
    Figure(
        "tokens_per_s_per_gpu",
        "{unit}s/s per GPU",
        lambda r: f"{r.tokens_per_s_per_gpu:,.1f}",
        _IN_TABLES,
        "per GPU",
    ),
    Figure("round_time_s", "round time", lambda r: duration(r.round_time_s) + _steps(r)),
    Figure("step_time_s", "step time", lambda r: duration(r.step_time_s), _EVERYWHERE, "step"),
    Figure("comm_busy_s", "communication busy, per round", lambda r: duration(r.comm_busy_s)),
    Figure(
        "-efficiency_vs_free_communication",
        "communication exposed, per round",
        lambda r: f"{r.exposed_share:.1%}",
        _EVERYWHERE,
        "exposed",
        lambda r: _share(r.exposed_comm_s, r),
    ),
    Figure("straggler_delay_s", "delay by slower ranks, per round", _delay),
    Figure(
        "overlap_ratio",
        "overlap ratio",
        lambda r: "-" if r.overlap_ratio is None else f"{r.overlap_ratio:.1%}",
        _IN_TABLES,
        "overlap",
        lambda r: "no communication" if r.overlap_ratio is None else f"{r.overlap_ratio:.1%}",
    ),
    Figure("mfu", "MFU", lambda r: f"{r.mfu:.1%}", _EVERYWHERE, "MFU"),
    Figure(
        "model_tflops_per_gpu", "model TFLOP/s per GPU", lambda r: _tflops(r.model_tflops_per_gpu)
    ),
    Figure(
        "hardware_tflops_per_gpu",
        "hardware TFLOP/s per GPU",
        lambda r: _tflops(r.hardware_tflops_per_gpu),
    ),
    Figure("micro_batch", "", brief_batch, frozenset({"sweep", "page"}), "batch"),
    Figure("memory_total_bytes", "", _memory, frozenset({"sweep", "page"}), "memory"),
    Figure(
        "wire_bytes_per_gpu_per_step",
        "sent per GPU and step",
        lambda r: scaled(r.wire_bytes_per_gpu_per_step, "B"),
    ),
    Figure(
        "nic_bytes_per_node_per_step",
        "sent per node's NICs and step",
        lambda r: scaled(r.nic_bytes_per_node_per_step, "B"),
    ),
    Figure("wan_bytes_per_site_per_step", "sent per site over the WAN and step", _wan),
    Figure("cost_per_billion_tokens", "{currency} per billion {unit}s", _cost),
)

COLUMNS = {one.heading: one.column for one in FIGURES if one.heading and "{" not in one.heading}
"""Headings of tables, with the columns behind them."""


def in_table(table: str) -> tuple[Figure, ...]:
    """The figures that a table has as columns, in order."""
    return tuple(one for one in FIGURES if table in one.tables)


def list_of(result: Result) -> Sequence[tuple[str, str]]:
    """Words and texts of all figures that one result has."""
    listed = (one.listed(result) for one in in_table("run"))
    return [row for row in listed if row]
