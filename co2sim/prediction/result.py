"""The figures of one configuration."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from co2sim.catalog import Fact
from co2sim.common.html_card import card
from co2sim.common.units import Bytes, Seconds, counted, duration, scaled
from co2sim.schedule.mesh import Mesh

FAR = 7.5
"""From this distance on a published run says little: stack, GPU, strategy and batch differ, say. An
eighth of the published runs are so far from the nearest one of another source."""

_NAMED = 8
"""Assumed inputs that are named."""

MemoryFit: TypeAlias = Literal["fits", "tight", "may not fit", "does not fit"]
"""The answers to the question whether something fits in the memory of a GPU."""

TIGHT = 0.85
"""The share of a GPU's memory from which on a prediction that fits is tight."""


def memory_fit(needed: Bytes, room: Bytes, low: Bytes | None = None) -> MemoryFit:
    """Whether the predicted bytes fit, whose 90 % interval begins at `low`.

    What is predicted to need more than there is may still fit, if the interval says so.
    """
    if needed <= room:
        return "tight" if needed > TIGHT * room else "fits"
    return "does not fit" if low is None or low > room else "may not fit"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Result(Mesh):
    """Figures of one configuration. Times are of the steady state; a step is an optimizer step.

    `stack` is the software stack; empty for what was measured, and where the GPU's file says
    how fast its kernels are. `tokens` are the model's units: tokens, or images. `global_batch` are
    the samples of a step over all GPUs (None for what was measured). `lora` is the rank
    of adapters, which have `trained_parameters` (both None: all is trained), and `quantize_base`
    how the weights beside them are stored. `parameters` are those of the model, `workers` the
    replicas that step on their own (1: all step together; both None for what was measured).
    `host_load` is what the host needs to issue the operations of passes over what the GPU needs for
    them: from 1 on the GPU waits (None for models without known kernels).
    `exposed_comm_s` is a part of `comm_busy_s`: the round time minus that of the same round with
    free communication (in a pipeline also waits for what other stages send); of what was measured,
    the time in which a rank communicates and computes nothing.
    `waiting_s` is what a rank spends in collectives before the last member is there, hidden or
    not, `straggler_delay_s` what slower or uneven ranks add to the round (None without any, and
    for what was measured), and `overlap_ratio` 1 - exposed / busy (None without communication).
    `breakdown_s` sums the spans of one rank in the last round by kernel or collective, waiting
    included. `sent_bytes_per_gpu_per_step` is what a GPU sends on any link by collective (empty for
    what was measured), and `wire_bytes_per_gpu_per_step` its sum; of a pipeline both are of the
    first stage. `memory_bytes_per_gpu` is by item, and in all ("total"), `memory_bytes_low` and
    `memory_bytes_high` are the ends of its 90 % interval, and `memory_interval_source` says where
    they come from; `allocated_bytes_per_gpu` is what
    PyTorch's `max_memory_allocated` counts of it. `assumed` lists the inputs that no
    source supports, `notes` what was chosen for options that were left open, which options
    change nothing, and what is not counted, `warnings` which option holds the strategy back,
    and what another value would give. `tokens_per_s_low` and `tokens_per_s_high` are the ends
    of a 90 % interval (None where nothing is known, and for what was measured), and
    `interval_source` says where they come from; `nearest_published` is the distance of the nearest
    published run, where these made the interval (`prediction.intervals`). `cost_per_billion_tokens`
    is in `currency`; `usd_per_billion_tokens` is None for other ones.
    """

    cluster: str
    model: str
    stack: str = ""
    unit: str
    strategy: str
    gpus: int
    nodes: int
    micro_batch: int
    accumulation: int
    global_batch: int | None = None
    recompute: str = "none"
    optimizer: str = "adamw"
    offload: str = "none"
    attention: str = "flash"
    lora: int | None = None
    quantize_base: str = "none"
    trained_parameters: int | None = None
    parameters: int | None = None
    workers: int | None = None
    tokens_per_gpu_per_step: int | float
    precision: str
    steps_per_round: int
    round_time_s: Seconds
    step_time_s: Seconds
    samples_per_s: float
    tokens_per_s: float
    tokens_per_s_low: float | None = None
    tokens_per_s_high: float | None = None
    interval_source: str = ""
    nearest_published: float | None = None
    tokens_per_s_per_gpu: float
    model_tflops_per_gpu: float
    hardware_tflops_per_gpu: float
    mfu: float
    host_load: float | None = None
    comm_busy_s: Seconds
    waiting_s: Seconds
    straggler_delay_s: Seconds | None = None
    exposed_comm_s: Seconds
    overlap_ratio: float | None
    breakdown_s: dict[str, Seconds]
    sent_bytes_per_gpu_per_step: dict[str, Bytes] = field(default_factory=dict)
    wire_bytes_per_gpu_per_step: Bytes
    nic_bytes_per_node_per_step: Bytes
    wan_bytes_per_site_per_step: Bytes
    memory_bytes_per_gpu: dict[str, Bytes]
    allocated_bytes_per_gpu: Bytes
    gpu_memory_bytes: Bytes
    memory_bytes_low: Bytes | None = None
    memory_bytes_high: Bytes | None = None
    memory_interval_source: str = ""
    fits_in_memory: bool
    usd_per_billion_tokens: float | None
    cost_per_billion_tokens: float | None = None
    currency: str | None = None
    steady: bool
    rounds_simulated: int
    assumed: tuple[Fact, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """The cluster's name; of "8 DGX H100 of 8 ..." the first number is that of the job.

        A number of sites stays.
        """
        named = re.sub(r"^\d+(?! sites? )(?= [\w. -]+ of \d)", str(self.nodes), self.cluster)
        return re.sub("^1 nodes ", "1 node ", named)

    def __repr__(self) -> str:
        figures = ", ".join(f"{name} {value}" for name, value in self._key_figures().items())
        where = f"{self.strategy}; {self.gpus} GPUs; {self.cluster}; {self.model}"
        return f"<Result: {where}; {figures}>"

    def _repr_html_(self) -> str:
        """For notebooks: the answer with its interval, the key figures, warnings and notes."""
        rows = [("step", duration(self.step_time_s))]
        if self.steps_per_round > 1:
            rows += [(f"round of {self.steps_per_round} steps", duration(self.round_time_s))]
        rows += [(f"{self.unit}s/s of a GPU", f"{self.tokens_per_s_per_gpu:,.0f}")]
        rows += list(self._key_figures().items())[2:]
        return card(self._answer(), rows, remarks=self._remarks())

    def _answer(self) -> str:
        low, high = self.tokens_per_s_low, self.tokens_per_s_high
        where = f"{self.strategy} on {counted(self.gpus, 'GPU')} of {self.cluster}"
        speed = f"at {self.tokens_per_s:,.0f} {self.unit}s/s"
        if low is not None and high is not None:
            speed += f" (90 %: {low:,.0f} to {high:,.0f})"
        if self.fits_in_memory:
            return f"{where} trains {self.model} {speed}."
        return f"{self.model} {self.misfit} in memory with {where}. If it does: {speed}."

    def _remarks(self) -> list[str]:
        """What a reader of the figures has to know."""
        found = ["No published run is near this one."] if self.unlike_published else []
        found += [f"Warning: {text}" for text in self.warnings]
        if not self.steady:
            found.append(f"Not a steady state: {counted(self.rounds_simulated, 'round')} were run.")
        if self.interval_source:
            found.append(f"90 % interval: {self.interval_source}")
        found.extend(f"Note: {text}" for text in self.notes)
        if self.assumed:
            paths = list(dict.fromkeys(fact.path for fact in self.assumed))
            rest = len(paths) - _NAMED
            more = f" and {rest} more" if rest > 0 else ""
            found.append(f"Assumed, without a source: {', '.join(paths[:_NAMED])}{more}")
        return found

    def _key_figures(self) -> dict[str, str]:
        cost = {}
        if self.cost_per_billion_tokens is not None:
            price = f"{self.cost_per_billion_tokens:,.2f} {self.currency}"
            cost = {f"cost of a billion {self.unit}s": price}
        return {
            f"{self.unit}s/s": f"{self.tokens_per_s:,.0f}",
            "step": duration(self.step_time_s),
            "MFU": f"{self.mfu:.1%}",
            "exposed communication": f"{self.exposed_share:.1%}",
            "memory": self.memory_answer,
            **cost,
        }

    @property
    def exposed_share(self) -> float:
        """Exposed communication as a fraction of the round."""
        return self.exposed_comm_s / self.round_time_s

    @property
    def efficiency_vs_free_communication(self) -> float:
        """Round time with free communication divided by the round time: 1 - `exposed_share`."""
        return 1.0 - self.exposed_share

    @property
    def unlike_published(self) -> bool:
        """Whether no published run is near, though the interval is made of their errors."""
        return self.nearest_published is not None and self.nearest_published >= FAR

    @property
    def memory_fit(self) -> MemoryFit:
        """Whether it fits in memory."""
        needed = self.memory_bytes_per_gpu["total"]
        return memory_fit(needed, self.gpu_memory_bytes, self.memory_bytes_low)

    @property
    def misfit(self) -> str:
        """The same of a case that needs more memory than there is; empty of others."""
        return "" if self.fits_in_memory else self.memory_fit.upper()

    @property
    def memory_word(self) -> str:
        """The verdict for tables and charts, in capitals where more is needed than there is."""
        return self.misfit or self.memory_fit

    @property
    def memory_answer(self) -> str:
        """What a GPU needs of the memory that it has, with the interval, and whether that fits."""
        needed = self.memory_bytes_per_gpu["total"]
        text = f"{scaled(needed, 'B')} of {scaled(self.gpu_memory_bytes, 'B')}{self._memory_ends()}"
        high = self.memory_bytes_high
        risky = self.fits_in_memory and high is not None and high > self.gpu_memory_bytes
        doubt = "; not at the bad end: test first" if risky else ""
        return f"{self.memory_word}, {text}{doubt}"

    def _memory_ends(self) -> str:
        low, high = self.memory_bytes_low, self.memory_bytes_high
        if low is None or high is None:
            return ""
        return f" (90 %: {scaled(low, 'B')} to {scaled(high, 'B')})"

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON."""
        return asdict(self) | {"memory_fit": self.memory_fit}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Result":
        """From `to_dict`, or its JSON. Raises ValueError for anything else."""
        from pydantic import TypeAdapter  # noqa: PLC0415 - 0.1 s that a simulation does not need

        return TypeAdapter(cls).validate_python(values)
