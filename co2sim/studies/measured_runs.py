"""Runs that a user measured: the rows of a CSV file, and traces of PyTorch's profiler."""

import csv
import gzip
import io
import json
import math
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, Self

from co2sim.common import files
from co2sim.common.errors import CatalogError, Co2simError, OptionError, given, nearest, visible
from co2sim.common.units import Bytes, Seconds, parse
from co2sim.prediction.question import Question
from co2sim.training.memory import GIB

_CASE = tuple(
    one.name
    for one in fields(Question)
    if "option" in one.metadata and one.metadata["option"].group in {"place", "job", "pipeline"}
)
SPEEDS = ("tokens_per_s_per_gpu", "tokens_per_s", "step_time")
"""Columns of which a row has exactly one, unless it has a trace. A step may be "850 ms"."""
_ONE = ("stack", "overrides")
"""What all runs of a calibration share."""
COLUMNS = (
    "model",
    "strategy",
    *(n for n in _CASE if n not in _ONE),
    *SPEEDS,
    "memory_gib",
    "trace",
)
"""All that a file may have. What it has not is what the command line says."""

_OF_MODEL = re.compile(r"model\.\w+")
"""A number of the model, such as model.seq_len."""
_MOST_ROWS = 200
_MOST_TRACE = 2 * 2**30
"""Bytes of a trace, unpacked."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What one GPU spent on the kernels of an optimizer step, by PyTorch's profiler.

    `step` is how long the step took, and `elementwise` is of all kernels that are not products,
    attention or communication, and of copies within the memory of the GPU.
    """

    step: Seconds
    products: Seconds
    attention: Seconds
    elementwise: Seconds
    communication: Seconds


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run that was measured: tokens/s of a GPU, and what else is known.

    `memory` is the peak that PyTorch's allocator reserved (`torch.cuda.max_memory_reserved`).
    """

    where: str
    case: Question
    tokens_per_s_per_gpu: float
    memory: Bytes | None = None
    profile: Profile | None = None


def measured_runs(path: Path, job: Question) -> list[MeasuredRun]:
    """The runs of a CSV file, each the case `job` with what its row says.

    Raises CatalogError for a file that cannot be read, and for a bad row with its line and rule.
    """
    runs = []
    for line, row in _rows(path):
        where = f"{path}, line {line}"
        try:
            runs.append(_run(where, row, job, path.parent))
        except Co2simError as error:
            text = str(error)
            raise CatalogError(text if text.startswith(where) else f"{where}: {text}") from error
    if not runs:
        raise CatalogError(f"{path}: no rows; one run is one row below the line of columns")
    return runs


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, str]]]:
    """The rows with their lines; empty fields are left out, lines with # are comments."""
    try:
        text = visible(files.text_of(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text in UTF-8"
        raise CatalogError(f"cannot read {path}: {reason}") from error
    columns: list[str] | None = None
    count = 0
    for line_number, line in enumerate(io.StringIO(text), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            texts = [text.strip() for text in next(csv.reader([line.rstrip("\n")], strict=True))]
        except csv.Error as error:
            raise CatalogError(f"{path}, line {line_number}: {error}") from error
        if columns is None:
            columns = texts
            _check_columns(path, columns)
            continue
        if len(texts) != len(columns):
            raise CatalogError(
                f"{path}, line {line_number}: {len(texts)} fields under {len(columns)} columns"
            )
        count += 1
        if count > _MOST_ROWS:
            raise CatalogError(
                f"{path} has more than {_MOST_ROWS} rows, the most that there may be"
            )
        yield line_number, {name: text for name, text in zip(columns, texts, strict=True) if text}


def _check_columns(path: Path, columns: list[str]) -> None:
    if len(columns) == 1 and ";" in columns[0]:
        raise CatalogError(f"{path}: fields are separated by commas, not by semicolons")
    for name in columns:
        if name in _ONE:
            raise CatalogError(f"{path}: all rows share --{name}; give it on the command line")
        if name not in COLUMNS and not _OF_MODEL.fullmatch(name):
            raise CatalogError(f"{path}: unknown column {given(name)}; {nearest(name, COLUMNS)}")
        if columns.count(name) > 1:
            raise CatalogError(f"{path}: column {name} stands there twice")


def _run(where: str, row: Mapping[str, str], job: Question, folder: Path) -> MeasuredRun:
    said: dict[str, Any] = {name: text for name, text in row.items() if name in _CASE}
    said |= {name: row[name] for name in ("model", "strategy") if name in row}
    shape = {name: text for name, text in row.items() if _OF_MODEL.fullmatch(name)}
    case = replace(job, **said, overrides={**job.overrides, **shape})
    for name in ("model", "strategy"):
        if not getattr(case, name):
            raise OptionError(f"no {name}; give the column {name}, or --{name}")
    profile = read_profile(folder / row["trace"]) if "trace" in row else None
    stated = [name for name in SPEEDS if name in row]
    if len(stated) > 1 or not (stated or profile):
        raise OptionError(f"a row has one of {', '.join(SPEEDS)}, or a trace")
    memory = _above_zero("memory_gib", row["memory_gib"]) if "memory_gib" in row else None
    kind, value = (stated[0], row[stated[0]]) if stated else ("step_time", "")
    seconds = profile.step if profile and not stated else None
    speed = _speed(case, kind, value, seconds)
    return MeasuredRun(where, case, speed, memory and memory * GIB, profile)


def _speed(case: Question, kind: str, text: str, seconds: Seconds | None) -> float:
    """Tokens/s of a GPU."""
    job = case.job()
    gpus, work = job.cluster.layout.world_size, job.workload
    if kind == "tokens_per_s_per_gpu":
        return _above_zero(kind, text)
    if kind == "tokens_per_s":
        return _above_zero(kind, text) / gpus
    step = parse(text, "s") if seconds is None else seconds
    if not 0 < step < math.inf:
        raise OptionError(f"step_time is {given(text)}; it must be above 0 s")
    return work.samples_per_gpu * work.model.tokens / case.together / step


def _above_zero(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise OptionError(f"{name} is {given(text)}; it must be a number above 0")
    return value


_STEP_NAME = re.compile(r"ProfilerStep#\d+")
_KERNELS = {"kernel", "gpu_memcpy", "gpu_memset"}
_GPU_MARK = "gpu_user_annotation"
_PARTS = ("products", "attention", "elementwise", "communication")
_KERNEL_NAMES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (part, re.compile(pattern, re.IGNORECASE))
    for part, pattern in (
        # Between memory of the host and of the GPU: no kernel
        ("", r"^(memcpy|copy).*(HtoD|DtoH|HostToDevice|DeviceToHost)"),
        ("communication", r"^memcpy.*PtoP"),
        # TorchInductor: a template is what it is named after; what is fused otherwise is
        # elementwise whatever operations its name lists
        ("attention", r"^triton_tem_.*flex_(attention|decoding)"),
        ("products", r"^triton_tem_"),
        ("elementwise", r"^triton_([a-z]{3}_)?(fused|_)"),
        # Kernels of PyTorch, which have their functor as an argument
        ("elementwise", r"^(void )?at::native::([^<]*::)?\w*(elementwise|reduce|apply)_kernel\b"),
        ("communication", r"[nr]ccl|msccl|deep_ep::|nvshmem|multimem|userbuffers"),
        ("communication", r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|cross_device_re"),
        # They may have CUTLASS, flash or conv in their names
        ("elementwise", r"layer_?norm|rms_?norm|rotary|cross_entropy|causal_conv1d|depthwise"),
        ("attention", r"flash(?!infer)|fmha|attn|attention|attend_|sdpa|(prefill|decode)With"),
        (
            "attention",
            r"dot_do_o|do_o_dot|convert_dq|(^|\W)_?(fwd|bwd)_kernel(_d[kqv]\w*|_fuse)?\b",
        ),
        ("attention", r"^_?bwd_(pre|post)process|_?bwd_(dq|dkdv|dkdvdq)|(^|_)mla_|(^|\W)mha_"),
        ("elementwise", r"im2col|col2im|nchw\w*nhwc|nhwc\w*nchw"),
        ("products", r"gemm|gemv|cijk_|rocblas|hipblas|cublas|nvjet|xmma|wgmma|split_?k|matmul"),
        ("products", r"(^|[^a-z])(add|badd|b|sp|sdd)?b?mm([^a-z]|$)|fused_moe_kernel|scatter2"),
        ("products", r"cutlass(_|::(kernel|device_kernel|gemm|conv|reduction))|_(sdd|dsd|dds)_"),
        ("products", r"conv(?!ert)|winograd|[dw]grad|syrk|trmm|trsm|tensorop"),
    )
)
"""Which part of a step a kernel is, by the first pattern that its name holds; else elementwise."""
_OVERFULL = 1.1
"""Kernels of one stream follow each other, but for launches that overlap for some microseconds
(programmatic dependent launch); beyond this share of the time there are several GPUs in a trace."""


def part_of_step(name: str) -> str:
    """Which part of a step a kernel of this name is, as in `Profile`; "" for none."""
    return next((part for part, names in _KERNEL_NAMES if names.search(name)), "elementwise")


def read_profile(path: Path) -> Profile:
    """The times of an optimizer step in a trace of PyTorch's profiler (`export_chrome_trace`).

    The trace is of one process with one GPU, JSON or JSON in gzip, and holds one step or more, each
    marked by `profiler.step()`. Kernels of no marked step are left out. Raises CatalogError for
    what is none.
    """
    events = _events(path)
    kernels = [event for event in events if event.get("cat") in _KERNELS]
    if not kernels:
        raise CatalogError(
            f"{path}: no kernels of a GPU in the trace; record it with"
            " torch.profiler.ProfilerActivity.CUDA"
        )
    marks = [event for event in events if _STEP_NAME.fullmatch(str(event.get("name")))]
    steps = [event for event in marks if event.get("cat") != _GPU_MARK]
    if not steps or not median(event["dur"] for event in steps):
        raise CatalogError(
            f"{path}: no step in the trace is marked; call profiler.step() at the end of each"
        )
    names = [event["name"] for event in steps]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise CatalogError(
            f"{path}: {twice} is marked more than once; give the trace of one process"
        )
    kernels = _of_steps(kernels, events, marks)
    if not kernels:
        raise CatalogError(
            f"{path}: no kernel of the trace is in a marked step (ProfilerStep#...); call"
            " profiler.step() at the end of each step, as long as the trace is recorded"
        )
    _check_one_gpu(path, kernels)
    times = dict.fromkeys((*_PARTS, ""), 0.0)
    for event in kernels:
        times[part_of_step(str(event.get("name")))] += event["dur"]
    each = {name: times[name] * 1e-6 / len(steps) for name in _PARTS}
    return Profile(step=median(event["dur"] for event in steps) * 1e-6, **each)


def _of_steps(
    kernels: list[dict[str, Any]], events: list[dict[str, Any]], marks: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The kernels that a marked step launched, however much later they ran.

    Where the launch of a kernel is not in the trace, the kernel has to begin within a mark.
    """
    launches = {
        _argument(e, "correlation"): e["ts"] for e in events if e.get("cat") not in _KERNELS
    }
    launches.pop(None, None)
    on_host = _Spans.of(e for e in marks if e.get("cat") != _GPU_MARK)
    anywhere = _Spans.of(marks)
    within = []
    for e in kernels:
        launch = launches.get(_argument(e, "correlation"))
        if anywhere.hold(e["ts"]) if launch is None else on_host.hold(launch):
            within.append(e)
    return within


@dataclass(frozen=True, slots=True)
class _Spans:
    """Times of marks, in order and without overlaps."""

    begins: list[float]
    ends: list[float]

    @classmethod
    def of(cls, marks: Iterable[Mapping[str, Any]]) -> Self:
        begins: list[float] = []
        ends: list[float] = []
        for begin, end in sorted((mark["ts"], mark["ts"] + mark["dur"]) for mark in marks):
            if ends and begin <= ends[-1]:
                ends[-1] = max(ends[-1], end)
            else:
                begins.append(begin)
                ends.append(end)
        return cls(begins, ends)

    def hold(self, time: float) -> bool:
        turn = bisect_right(self.begins, time) - 1
        return turn >= 0 and time < self.ends[turn]


def _check_one_gpu(path: Path, kernels: list[dict[str, Any]]) -> None:
    """Refuse kernels of several devices or processes, or more than a stream has time for."""
    gpus = {str((kernel.get("pid"), _argument(kernel, "device"))) for kernel in kernels}
    streams: dict[str, float] = {}
    for kernel in kernels:
        if part_of_step(str(kernel.get("name"))) != "communication":  # beside others on some queues
            stream = str(_argument(kernel, "stream") or kernel.get("tid"))
            streams[stream] = streams.get(stream, 0.0) + kernel["dur"]
    first = min(kernel["ts"] for kernel in kernels)
    last = max(kernel["ts"] + kernel["dur"] for kernel in kernels)
    if len(gpus) > 1:
        raise CatalogError(
            f"{path}: kernels of {len(gpus)} GPUs in the trace; give the trace of one process with"
            " one GPU"
        )
    if max(streams.values(), default=0.0) > _OVERFULL * (last - first):
        raise CatalogError(
            f"{path}: kernels of one stream take longer than the time from the first to the last"
            " of them, so there are several GPUs in the trace; give the trace of one process with"
            " one GPU"
        )


def _argument(event: Mapping[str, Any], name: str) -> int | str | None:
    """What a profiler says of an event besides its times."""
    held = event.get("args")
    value = held.get(name) if isinstance(held, Mapping) else None
    return value if isinstance(value, int | str) else None


def _events(path: Path) -> list[dict[str, Any]]:
    """The complete events with a length."""
    try:
        raw = path.open("rb")
        with raw, gzip.open(raw) if path.suffix == ".gz" else raw as opened:
            content = opened.read(_MOST_TRACE + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CatalogError(f"cannot read {path}: {reason}") from error
    if len(content) > _MOST_TRACE:
        raise CatalogError(f"{path} is larger than {_MOST_TRACE // 2**30} GiB; record fewer steps")
    try:
        tree = json.loads(content)
        events = tree["traceEvents"] if isinstance(tree, dict) else tree
        whole = [e for e in events if e.get("ph") == "X"]
        return [e for e in whole if _is_time(e.get("ts")) and _is_time(e.get("dur"))]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CatalogError(
            f"{path} is no trace of PyTorch's profiler (export_chrome_trace)"
        ) from error


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < math.inf
