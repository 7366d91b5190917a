"""The memory of a GPU over a step, and what other options would save of it, found by trying them.

Nothing is simulated: a trial takes milliseconds.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product
from typing import Any, TypeAlias

from co2sim.common.errors import Co2simError, OptionError
from co2sim.common.units import Bytes
from co2sim.prediction.intervals import memory_ends
from co2sim.prediction.job import Job, Stage
from co2sim.prediction.question import Question
from co2sim.prediction.result import MemoryFit, Result, memory_fit
from co2sim.strategies import STRATEGIES, Strategy, with_options
from co2sim.strategies.co2 import has_auto_options
from co2sim.strategies.step import title
from co2sim.training.memory import OVERHEAD, Timeline

_SHARDED = ("zero1", "zero2", "zero3", "fsdp")
"""Strategies, or inner ones, that keep less than a whole model and its states on every GPU."""
_DOUBLINGS = 6
"""Of the GPUs: up to 64 times as many."""
_TOGETHER = ("strategy", "attention", "recompute", "micro-batch", "gpus")
"""Options that are tried together, where none is enough alone."""
_STEPWISE = ("micro-batch", "gpus")
"""Options whose first value tells what the next ones save."""
_BATCH = {"micro-batch", "recompute"}
"""Options that a job takes without being made again."""
_MORE_AGAIN = {"none": ("selective", "full"), "full": ()}
"""Recomputation that makes more again."""
_LITTLE = 1e-3
"""Of the memory: what saves less is left out."""

_Choices: TypeAlias = dict[str, dict[str, Any]]
"""Values of options by their texts, by the name of the option, the nearest first."""


@dataclass(frozen=True, slots=True)
class Change:
    """Options in place of a question's own, by name, and what a GPU then needs: by item, in all."""

    options: Mapping[str, str]
    memory: Mapping[str, Bytes]
    fit: MemoryFit

    @property
    def total(self) -> Bytes:
        """In bytes."""
        return self.memory["total"]

    @property
    def words(self) -> str:
        """The options as they are typed."""
        return " ".join(f"--{name} {text}".rstrip() for name, text in self.options.items())


@dataclass(frozen=True)
class StepMemory:
    """What a GPU of the fullest stage holds over a step of a question with numbers.

    `asked` is the question as it was asked: what its strategy leaves open stays open in changes.
    """

    asked: Question
    settled: Question

    @classmethod
    def of(cls, case: Question, result: Result) -> "StepMemory":
        """Of a case that was simulated, with what was chosen for it.

        The global batch stays in changes, unless the number of micro-steps was given.
        """
        fixed = case.accumulation is not None or result.global_batch is None
        asked = replace(
            case,
            micro_batch=result.micro_batch,
            accumulation=result.accumulation if fixed else None,
            global_batch=None if fixed else result.global_batch,
            recompute=result.recompute,
        )
        settled = asked
        if has_auto_options(case.parsed):
            settled = replace(asked, strategy=result.strategy)
        return cls(asked, settled)

    @cached_property
    def job(self) -> Job:
        """What was simulated."""
        return self.settled.job()

    @cached_property
    def stage(self) -> Stage:
        """The fullest one."""
        return self._fullest(self.job)

    @cached_property
    def line(self) -> Timeline:
        """What PyTorch allocates there, by moment and item."""
        return self.stage.timeline()

    @cached_property
    def items(self) -> dict[str, Bytes]:
        """At the peak, with what PyTorch does not allocate, and in all."""
        return self.stage.memory()

    @property
    def beside(self) -> dict[str, Bytes]:
        """What PyTorch does not allocate."""
        return {name: size for name, size in self.items.items() if name in OVERHEAD}

    @property
    def room(self) -> Bytes:
        """What a GPU has."""
        return self.job.cluster.gpu.memory

    @cached_property
    def savings(self) -> list[Change]:
        """What each option alone would save, the most first; without what saves nothing."""
        limit = self.items["total"] * (1 - _LITTLE)
        nearest = {
            name: dict([*values.items()][:1]) if name in _STEPWISE else values
            for name, values in self._choices.items()
        }
        less = (change for change in self._alone(nearest) if change.total < limit)
        return sorted(less, key=lambda change: change.total)

    @cached_property
    def fitting(self) -> list[Change]:
        """What would fit: options alone, or else the fewest together; nothing in vain.

        Where nothing fits: the smallest of all that was tried.
        """
        tried = list(self._alone(self._choices))
        if all(change.total > self.room for change in tried):
            tried += self._together()
        inside = [change for change in tried if change.total <= self.room]
        return _fewest_changes(inside) or sorted(tried, key=lambda change: change.total)[:1]

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON, in bytes."""
        line, total = self.line, self.items["total"]
        return {
            "stage": self.stage.number,
            "peak": line.moments[line.peak],
            "peak_items": self.items,
            "moments": list(line.moments),
            "items": {name: sizes.tolist() for name, sizes in line.items.items()},
            "milestones": {name: float(line.total[i]) for name, i in line.milestones.items()},
            "options": [
                {
                    "option": change.words,
                    "saves": total - change.total,
                    "total": change.total,
                    "memory_fit": change.fit,
                }
                for change in self.savings
            ],
        }

    # --- trials ---------------------------------------------------------------------------------

    @cached_property
    def _choices(self) -> _Choices:
        """Every option that may need less memory, with its values; without what is taken."""
        job, work, asked = self.job, self.job.workload, self.settled
        micro = [work.micro_batch >> times for times in range(1, work.micro_batch.bit_length())]
        gpus = job.cluster.layout.world_size
        more = _MORE_AGAIN.get(work.recompute, ("full",))
        parts = job.cluster.gpus_per_node.bit_length()
        host = {
            "none": ("optimizer", "parameters", "activations"),
            "optimizer": ("parameters",),
        }
        values: dict[str, Iterable[Any]] = {
            "recompute": more if any(block.boundary for block in work.model.blocks) else (),
            "attention": ["flash"] * (work.attention == "eager"),
            "loss": ["fused"] * (work.loss == "eager"),
            "micro-batch": micro,
            "optimizer": ["adamw_8bit"] * work.optimizer.name.startswith("adamw"),
            "tp": [work.tp << times for times in range(1, parts)],
            "cp": [2 * work.cp],
            "pp": [2 * work.pp],
            "gpus": [gpus << times for times in range(1, _DOUBLINGS + 1)],
            "offload": host.get(work.offload, ()),
            "quantize-base": ["nf4"] * (work.lora is not None and work.quantize_base == "none"),
        }
        texts = {name: {str(value): value for value in several} for name, several in values.items()}
        return {"strategy": dict(_strategies(self.asked, asked, job)), **texts}

    def _alone(self, choices: _Choices) -> Iterator[Change]:
        for name, values in choices.items():
            for text in values:
                yield from self._tried({name: text})

    def _together(self) -> Iterator[Change]:
        """Several options, those with the fewest changes first."""
        texts = [["", *self._choices[name]] for name in _TOGETHER]
        for point in sorted(product(*texts), key=lambda point: sum(map(bool, point))):
            options = {name: text for name, text in zip(_TOGETHER, point, strict=True) if text}
            if len(options) > 1:
                yield from self._tried(options)

    @cached_property
    def _jobs(self) -> dict[tuple[tuple[str, str], ...], Job]:
        """Jobs that were tried, by options: their memory is quick but for the first time."""
        return {(): self.job}

    @staticmethod
    def _fullest(job: Job, made: Job | None = None) -> Stage:
        """The fullest stage of a job; `made` is the same but for its batch."""
        work = job.workload
        return (made or job).fullest(work.micro_batch, work.accumulation, work.recompute)

    def _tried(self, options: dict[str, str]) -> Iterator[Change]:
        """The change; nothing where GPUs cannot take it, or where the stack has not what it has."""
        options = dict(options)
        values = {name.replace("-", "_"): self._choices[name][options[name]] for name in options}
        if "tp" in options and self._divides_sequence:
            options["sequence-parallel"], values["sequence_parallel"] = "", True
        try:
            job = self._job(replace(self.settled, **values))
            if set(job.lacks()) - set(self.job.lacks()):
                return
            key = tuple(pair for pair in options.items() if pair[0] not in _BATCH)
            memory = self._fullest(job, self._jobs.setdefault(key, job)).memory()
        except Co2simError:  # a cluster that cannot hold them, a batch that they do not divide
            return
        low = (
            memory_ends(memory["total"], job.stack.name, job.least_memory())[0]
            if job.cluster.backend == "nccl"
            else None
        )
        yield Change(options, memory, memory_fit(memory["total"], self.room, low))

    @property
    def _divides_sequence(self) -> bool:
        stack, settled = self.job.stack, self.settled
        always = stack.always_divides_sequence
        always |= stack.experts_divide_sequence and self.job.has_experts
        return always and not settled.sequence_parallel

    def _job(self, question: Question) -> Job:
        """Of the same global batch where GPUs can take it, else of as many micro-steps."""
        try:
            return question.job()
        except OptionError:
            if question.global_batch is None:
                raise
            steps = self.job.workload.accumulation
            return replace(question, global_batch=None, accumulation=steps).job()


def _strategies(asked: Question, settled: Question, job: Job) -> Iterator[tuple[str, Strategy]]:
    """Those that shard more, as they are given to --strategy without quotes.

    With the options that the stack needs; of local updates, with other inner ones.
    """
    for name in _SHARDED:
        if not {"worker", "inner"} <= _options(asked.parsed):
            needs = (job.stack.needs(name) or [{}])[0]
            made = with_options(STRATEGIES[name](), {k: v[0] for k, v in needs.items()})
            open_: Strategy | None = made
            inner: Strategy | None = made
        else:
            open_, inner = _inside(asked.parsed, name), _inside(settled.parsed, name)
        if open_ and inner and title(inner) != title(settled.parsed):
            yield title(open_).replace("(", ":").replace(", ", ",").removesuffix(")"), inner


def _options(strategy: Strategy) -> set[str]:
    """Their names."""
    return {option.name for option in fields(strategy)}  # type: ignore[arg-type]


def _inside(strategy: Strategy, name: str) -> Strategy | None:
    """The same strategy with this inner one; None where another option rules it out."""
    worker = "site" if strategy.worker == "site" else "node"  # type: ignore[attr-defined]
    try:
        return with_options(strategy, {"worker": worker, "inner": name})
    except OptionError:
        return None


def _fewest_changes(tried: Iterable[Change]) -> list[Change]:
    """Those that change nothing in vain: no other one changes less of the same."""
    kept: list[Change] = []
    for change in tried:
        if not any(_within(fewer.options, change.options) for fewer in kept):
            kept.append(change)
    return kept


def _within(few: Mapping[str, str], many: Mapping[str, str]) -> bool:
    """Whether `many` changes the same, and as far or further."""
    further: dict[str, Callable[[str, str], bool]] = {
        "strategy": operator.eq,
        "offload": operator.eq,
        "micro-batch": lambda less, more: int(more) <= int(less),
        "gpus": lambda less, more: int(more) >= int(less),
        "tp": lambda less, more: int(more) >= int(less),
    }
    return all(
        name in many and (name not in further or further[name](text, many[name]))
        for name, text in few.items()
    )
