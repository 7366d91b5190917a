"""What one GPU does: rates, transformer layers and training steps, and what this library adds.

    python benchmarks/gpu/measure.py --out FOLDER            # 5 minutes on an H100
    python benchmarks/gpu/measure.py --out FOLDER --only layers,training
    python benchmarks/gpu/measure.py --quick --out FOLDER    # tiny shapes, on a CPU, too

Writes gpu.json in SI units after every section: what failed is a line of it, and the exit code is
then 1. `co2analysis gpu FOLDER` makes a page of it, with predictions beside what was measured.
"""

import argparse
import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias, get_args

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from reports import commit
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformer import Decoder, Layer, Product, as_fp8

from co2sim.catalog import load_model
from co2sim.catalog.facts import plain, read
from co2sim.catalog.specs import ModelSpec
from co2sim.common.files import write_atomically
from co2sim.models import operators
from realrun import algorithms
from realrun.algorithms import LateAverage, LocalUpdate, quantization
from realrun.algorithms.averaging import Average
from realrun.algorithms.outer_loop import mark_of
from realrun.algorithms.process_groups import DEADLINE, Wire
from realrun.algorithms.quantization_format import wire_bytes

Rows: TypeAlias = list[dict[str, Any]]

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
SHAPES = {"gpt2-small": 16, "gpt2-xl": 8, "llama-7b": 4, "llama3-8b": 1, "llama3-70b": 1}
"""Models of the catalog, and samples of a micro-batch: 8,192 or 16,384 tokens."""
IN_FP8 = ("llama3-8b", "llama3-70b")
TRAINED = {"gpt2-small": 16, "gpt2-medium": 8, "gpt2-xl": 4}
PARTS = {
    "matrix products": ("gemm", "cutlass", "nvjet", "xmma", "splitk", "_mm"),
    "attention": ("flash", "fmha", "sdpa", "attention"),
}
"""Words in the names of kernels; all others are elementwise, norms among them."""
TINY = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "kv_heads": 0, "head_dim": 0}


def synchronize() -> None:
    """Wait for the GPU."""
    if GPU:
        torch.cuda.synchronize()


def timed(action: Callable[[], object], repeats: int = 20, warm_up: int = 3) -> float:
    """Median seconds of an action, from event to event."""
    for _ in range(warm_up):
        action()
    synchronize()
    if not GPU:
        found = []
        for _ in range(3):
            start = time.perf_counter()
            action()
            found.append(time.perf_counter() - start)
        return median(found)
    pairs = []
    for _ in range(repeats):
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        action()
        pair[1].record()
        pairs.append(pair)
    synchronize()
    return median(start.elapsed_time(end) for start, end in pairs) / 1e3


def free() -> None:
    """Give all memory back, and forget the peak."""
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def allocated() -> int:
    """Bytes of tensors."""
    return torch.cuda.memory_allocated() if GPU else 0


def peak() -> int:
    """The most bytes of tensors since `free`."""
    return torch.cuda.max_memory_allocated() if GPU else 0


def shape_of(name: str, *, quick: bool) -> dict[str, Any]:
    """The shape of a transformer of the catalog; with `quick` a tiny one of its kind."""
    tree = {"name": name, **plain(read("models", name))}
    spec: Any = ModelSpec.model_validate({"model": tree}).model
    shape = {key: getattr(spec, key) for key in ("vocab", "positions", "tied")}
    shape |= {"body": asdict(spec.body()), "tokens": spec.seq_len}
    if quick:
        shape["body"] = {**shape["body"], **TINY}
        shape |= {"vocab": 128, "tokens": 16, "positions": 16 if shape["positions"] else 0}
    return shape


# --- rates ----------------------------------------------------------------------------------------


def rates(*, quick: bool) -> Rows:
    """Copies, large matrix products, and what a launch costs the host and the GPU."""
    size = 2**20 if quick else 2**30
    source = torch.randint(255, (size,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    seconds = timed(partial(target.copy_, source))
    rows: Rows = [{"what": "copy", "bytes": 2 * size, "seconds": seconds}]
    del source, target
    for width in (64,) if quick else (4096, 8192):
        a, b = (torch.randn(width, width, device=DEVICE) for _ in range(2))
        for kind in ("fp32", "tf32", "fp16", "bf16", "fp8"):
            if (product := _product(kind, a, b)) is None:
                continue
            torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
            row = {"what": f"product of {width}", "precision": kind, "flops": 2 * width**3}
            rows.append({**row, "seconds": timed(product)})
        torch.backends.cuda.matmul.allow_tf32 = False
    return [*rows, *_launches(quick=quick)]


def _product(kind: str, a: Tensor, b: Tensor) -> Callable[[], object] | None:
    if kind == "fp8":
        if not GPU or torch.cuda.get_device_capability() < (8, 9):
            return None
        (left, one), (right, two) = as_fp8(a), as_fp8(b)
        return lambda: torch._scaled_mm(  # noqa: SLF001 - torch has no public product in fp8
            left, right.t(), scale_a=one, scale_b=two, out_dtype=torch.bfloat16
        )
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(kind, torch.float32)
    x, y = a.to(dtype), b.to(dtype)
    return lambda: x @ y


def _launches(*, quick: bool) -> Rows:
    """A kernel of no work: how often the host issues one, and how often a graph runs one."""
    x, count = torch.zeros(1, device=DEVICE), 10 if quick else 2000

    def every() -> None:
        for _ in range(count):
            x.add_(1)

    every()
    synchronize()
    start = time.perf_counter()
    every()
    issued = time.perf_counter() - start
    synchronize()
    rows: Rows = [{"what": "issue of a kernel", "seconds": issued / count}]
    if GPU:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            every()
        seconds = timed(graph.replay, repeats=5) / count
        rows.append({"what": "kernel of a graph", "seconds": seconds})
    return rows


# --- transformers ---------------------------------------------------------------------------------


def products(*, quick: bool) -> Rows:
    """The products of a layer with weights, in bf16: forward, and the two backward."""
    rows: Rows = []
    for name, samples in islice(SHAPES.items(), 1 if quick else None):
        model = load_model(name).value
        for place, one in enumerate(model.blocks[1].of(operators.Product)):
            n, inner, columns = (16,) * 3 if quick else (one.rows * samples, one.inner, one.columns)
            x = torch.randn(n, inner, device=DEVICE, dtype=torch.bfloat16)
            w = torch.randn(columns, inner, device=DEVICE, dtype=torch.bfloat16)
            y = torch.randn(n, columns, device=DEVICE, dtype=torch.bfloat16)
            works = {
                "forward": lambda x=x, w=w: x @ w.t(),
                "input gradient": lambda y=y, w=w: y @ w,
                "weight gradient": lambda x=x, y=y: y.t() @ x,
            }
            row = {"model": name, "product": place, "rows": n, "inner": inner, "columns": columns}
            rows += [{**row, "pass": key, "seconds": timed(work)} for key, work in works.items()]
    return rows


def layers(*, quick: bool) -> Rows:
    """One layer and four in a row: passes, kernels by kind, and what is kept for the backward."""
    rows: Rows = []
    for name, samples in islice(SHAPES.items(), 2 if quick else None):
        shape = shape_of(name, quick=quick)
        kinds = ["eager", "compiled", *["compiled, fp8"] * (GPU and name in IN_FP8)]
        for kind in kinds[:1] if quick else kinds:
            torch._dynamo.reset()  # noqa: SLF001 - so that one model's shapes do not recompile another
            for count in (1, 4):
                free()
                rows.append(
                    {
                        "model": name,
                        "samples": samples,
                        "tokens": shape["tokens"],
                        "kind": kind,
                        "layers": count,
                        **_stack(shape, samples, count, kind),
                    }
                )
    return rows


def _stack(shape: dict[str, Any], samples: int, count: int, kind: str) -> dict[str, Any]:
    body, rotary = shape["body"], not shape["positions"]
    with DEVICE:
        stack = nn.Sequential(*(Layer(body, rotary=rotary) for _ in range(count))).bfloat16()
    for one in stack.modules():
        if isinstance(one, Product):
            one.fp8 = kind.endswith("fp8")
    if kind != "eager":
        for layer in stack:
            layer.compile()
    x = torch.randn(
        samples, shape["tokens"], body["hidden"], device=DEVICE, dtype=torch.bfloat16
    ).requires_grad_()
    grad = torch.randn_like(x)

    def whole() -> None:
        stack(x).backward(grad)

    for _ in range(3):
        whole()
    before = allocated()
    made = stack(x)
    kept = allocated() - before
    made.backward(grad)
    del made
    with torch.no_grad():
        inference = timed(lambda: stack(x), repeats=10)
    synchronize()
    start = time.perf_counter()
    whole()
    issued = time.perf_counter() - start
    found = {
        "forward": timed(lambda: stack(x), repeats=10),
        "inference": inference,
        "both": timed(whole, repeats=10),
        "issued": issued,
        "kept_bytes": kept,
    }
    return found | ({"kernels": _kernels(whole)} if GPU and count == 1 else {})


def _kernels(action: Callable[[], object]) -> dict[str, dict[str, float]]:
    """Seconds and number of the kernels of each kind, and the longest by name."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        action()
        synchronize()
    found: dict[str, dict[str, float]] = {}
    for one in seen.key_averages():
        if not one.self_device_time_total or one.device_type.name != "CUDA":
            continue
        name = one.key.lower()
        part = next(
            (p for p, words in PARTS.items() if any(w in name for w in words)), "elementwise"
        )
        row = found.setdefault(part, {"seconds": 0.0, "count": 0})
        row["seconds"] += one.self_device_time_total / 1e6
        row["count"] += one.count
        row.setdefault("names", []).append(
            [one.key[:100], one.self_device_time_total / 1e6, one.count]
        )  # type: ignore[attr-defined, arg-type]
    return found


def training(*, quick: bool) -> Rows:
    """Steps of whole models: fp32 parameters, autocast to bf16, AdamW; time and memory."""
    rows: Rows = []
    for name, samples in islice(TRAINED.items(), 1 if quick else None):
        kinds = ["eager", "compiled", *["eager, recomputed"] * (name == "gpt2-xl")]
        for kind in kinds[:1] if quick else kinds:
            free()
            torch._dynamo.reset()  # noqa: SLF001 - as above
            shape = shape_of(name, quick=quick)
            row = {"model": name, "samples": samples, "tokens": shape["tokens"], "kind": kind}
            rows.append({**row, **_trained(shape, samples, kind)})
    return rows


def _trained(shape: dict[str, Any], samples: int, kind: str) -> dict[str, Any]:
    before = allocated()
    with DEVICE:
        model = Decoder(shape)
    if kind == "compiled":
        for layer in model.layers:
            layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=GPU)
    tokens = torch.randint(shape["vocab"], (samples, shape["tokens"]), device=DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = model(tokens, again="recomputed" in kind)
        loss.backward()
        optimizer.step()

    for _ in range(3):
        step()
    optimizer.zero_grad()
    synchronize()
    states = allocated() - before
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    seconds = timed(step, repeats=8, warm_up=0)
    size = sum(one.numel() for one in model.parameters())
    found = {"parameters": size, "seconds": seconds, "states_bytes": states, "peak_bytes": peak()}
    if GPU:
        available, total = torch.cuda.mem_get_info()
        found |= {
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "used_bytes": total - available,
            "update": timed(optimizer.step, repeats=5) if kind == "eager" else None,
        }
    return found


# --- what this library adds -----------------------------------------------------------------------


def codes(*, quick: bool) -> Rows:
    """Quantization of bf16 rows: seconds, bytes moved, and whether the bits are the CPU's."""
    elements = 2**14 if quick else 2**27
    x = torch.randn(4, elements // 4, device=DEVICE, dtype=torch.bfloat16)
    few = x[:, :5000].contiguous()
    rows: Rows = []
    for bits in (8, 4):
        for block in (256, 2048):
            made = quantization.quantize(x, bits, block)
            sent = wire_bytes(elements // 4, bits, block) * 4
            own, other = (quantization.quantize(one, bits, block) for one in (few, few.cpu()))
            same = all(torch.equal(a.cpu(), b) for a, b in zip(own, other, strict=True))
            size = (bits, block, x.shape[-1])
            works: dict[str, tuple[Callable[[], object], int]] = {
                "quantize": (
                    partial(quantization.quantize, x, bits, block),
                    2 * elements + sent,
                ),
                "dequantize": (
                    partial(quantization.dequantize, *made, *size),
                    4 * elements + sent,
                ),
                "sum of 4 rows": (partial(quantization.sum_rows, made, *size), elements + sent),
                "sum and quantize": (
                    partial(quantization.sum_and_quantize, made, *size, 1),
                    sent + sent // 4,
                ),
            }
            rows += [
                {"what": what, "bits": bits, "block": block, "bytes": moved, "same bits": same}
                | {"seconds": timed(work)}
                for what, (work, moved) in works.items()
            ]
    return rows


def sleeps(*, quick: bool) -> Rows:
    """How long a stream is held that shall be held for 1 and 10 ms: after idling, after work."""
    if not GPU:
        return []
    from realrun.execute.cuda_streams import hold  # noqa: PLC0415 - needs a GPU

    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    rows: Rows = []
    for after in ("idling", "products"):
        for seconds in (1e-4, 1e-3, 1e-2):
            hold(0.0)
            synchronize()
            if after == "idling":
                time.sleep(0.0 if quick else 1.0)
            else:
                timed(lambda: a @ a, repeats=100)
            found = timed(lambda seconds=seconds: hold(seconds), repeats=5, warm_up=0)
            rows.append({"after": after, "asked": seconds, "seconds": found})
    return rows


def averages(*, quick: bool) -> Rows:
    """Steps of a GPT-2 alone, and with algorithms whose averages go through one rank of NCCL."""
    with _alone():
        runs: list[tuple[str, dict[str, Any] | None]] = [
            ("no algorithm", None),
            ("LocalSGD", {"tau": 12}),
            ("CO2.published", {"tau": 12}),
            ("CO2.published", {"tau": 12, "clip": 1.0}),
            ("CO2", {"tau": 12, "delay": 6}),
            ("CO2", {"tau": 12, "delay": 6, "fragments": 12}),
            ("CO2", {"tau": 12, "delay": 6, "fragments": 12, "dtype": "int8"}),
            ("CO2.published", {"tau": 12, "dtype": "int8"}),
            ("no algorithm", None),
        ]
        return [_averaged(name, options, quick=quick) for name, options in runs]


def attached(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any
) -> LocalUpdate:
    """An algorithm by its name; `delay` and `fragments` say how late averages are used."""
    late = {key: options.pop(key) for key in ("delay", "fragments") if key in options}
    if late:
        options["delay"] = LateAverage(**late)
    make: Callable[..., LocalUpdate] = attrgetter(name)(algorithms)
    return make(model, optimizer, **options)


@contextmanager
def _alone() -> Iterator[None]:
    store = dist.HashStore()
    dist.init_process_group("nccl" if GPU else "gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _averaged(name: str, options: dict[str, Any] | None, *, quick: bool) -> dict[str, Any]:
    free()
    shape = shape_of("gpt2-small", quick=quick)
    with DEVICE:
        model = Decoder(shape).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=GPU)
    tokens = torch.randint(shape["vocab"], (8, shape["tokens"]), device=DEVICE)
    algorithm = None
    if options is not None:
        algorithm = attached(name, model, optimizer, **options)
        wire = options.get("dtype", "fp32")
        assert wire in get_args(Wire)
        # One rank alone has no average: here it goes through a communicator all the same.
        average = Average(dist.group.WORLD, wire, DEADLINE, 25 * 2**20)
        algorithm._outer.average = average  # noqa: SLF001 - a benchmark of what is inside
    tau, host = 12, []

    def steps(count: int) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            model(tokens).backward()
            before = time.perf_counter()
            optimizer.step()
            host.append(time.perf_counter() - before)
        synchronize()
        return (time.perf_counter() - start) / count

    rounds = 1 if quick else 5
    steps(tau if quick else 3 * tau)
    host.clear()
    seconds = steps(rounds * tau)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if GPU:
            torch.cuda.set_sync_debug_mode("warn")
        steps(tau)
        if GPU:
            torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchroniz" in str(one.message) for one in seen)
    row = {"algorithm": name, "options": options or {}, "seconds": seconds, "waits": waits / tau}
    row |= {"host": sum(host) / len(host), "memory_bytes": peak()}
    if algorithm:
        stats = algorithm.stats()
        row |= {"late": stats.late, "waited": stats.waited, "rounds": stats.rounds}
        algorithm.close()
    return row


def hashes(*, quick: bool) -> Rows:
    """The hash of weights by which ranks compare them."""
    size = 2**16 if quick else 2**28
    x = torch.randn(size, device=DEVICE)
    return [{"bytes": 4 * size, "seconds": timed(lambda: mark_of(x), repeats=3, warm_up=1)}]


SECTIONS: dict[str, Callable[..., Rows]] = {
    "rates": rates,
    "codes": codes,
    "sleeps": sleeps,
    "hashes": hashes,
    "averages": averages,
    "products": products,
    "layers": layers,
    "training": training,
}


def machine() -> dict[str, Any]:
    """What this runs on."""
    about: dict[str, Any] = {
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "gpu": None,
    }
    if GPU:
        import triton  # noqa: PLC0415 - only where there is a GPU

        properties = torch.cuda.get_device_properties(0)
        about |= {
            "gpu": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": list(torch.cuda.get_device_capability()),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "triton": triton.__version__,
        }
    return about


def recorded(
    sections: Mapping[str, Callable[..., Rows]],
    path: Path,
    about: Mapping[str, Any],
    *,
    quick: bool,
    writes: bool = True,
    together: bool = False,
) -> int:
    """Measure section by section, and write the file after each; 1 if any of them has failed.

    What one raises is kept, and the next begins, unless ranks measure `together`: their
    communicators no longer agree then. Of these one `writes`.
    """
    record: dict[str, Any] = {
        "format": 1,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": os.environ.get("COMMIT") or commit(),  # where files came without git
        "quick": quick,
        "machine": about,
        "seconds": {},
        "failures": {},
        "sections": {},
    }
    for name, section in sections.items():
        start = time.perf_counter()
        try:
            record["sections"][name] = section(quick=quick)
        except Exception as error:  # noqa: BLE001 - the other sections are worth as much
            record["failures"][name] = f"{type(error).__name__}: {error}"[:2000]
        record["seconds"][name] = round(time.perf_counter() - start, 1)
        problem = record["failures"].get(name)
        if writes:
            failed = f", failed: {problem}" if problem else ""
            print(f"{name}: {record['seconds'][name]} s{failed}", flush=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically({path: json.dumps(record, indent=1).encode()})
        if problem and together:
            break
    return bool(record["failures"])


def main() -> int:
    """Measure the sections that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of gpu.json")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, which mean nothing")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between")
    options = parser.parse_args()
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(SECTIONS):
        parser.error(f"--only {', '.join(sorted(unknown))}: it must be of {', '.join(SECTIONS)}")
    quick = options.quick or not GPU
    if not GPU:
        torch.set_num_threads(1)  # two that wait for each other take 60 times as long
    sections = {name: SECTIONS[name] for name in chosen}
    return recorded(sections, options.out / "gpu.json", machine(), quick=quick)


if __name__ == "__main__":
    sys.exit(main())
