"""What is done with a fuzzed input in this process, by its kind."""

import contextlib
import json
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fuzz_chakra
import fuzz_checkpoints
import fuzz_inputs as made_of
from fuzz_inputs import Fuzzed, Made
from fuzz_judge import Verdict, judged
from fuzz_options import overrides

from analysis.cli import main as co2analysis
from analysis.published.csv_tables import from_csv
from co2sim import study
from co2sim.blocks import Block, MatMul, Model
from co2sim.case import Case
from co2sim.catalog import load_cluster
from co2sim.cli import main as co2sim
from co2sim.published_speeds import read_speeds
from realrun import record
from realrun.record import Record


def trial(given: Fuzzed) -> Verdict:
    """Try an input in a folder of its own, which is gone afterwards."""
    rng = random.Random(given.seed)  # noqa: S311 - repeatable, not secret
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        made, run = KINDS[given.kind](rng, given.values)
        for path, data in made.files.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(data)
        before = {str(path) for path in Path().rglob("*")}
        verdict = judged(run)
        left = {str(path) for path in Path().rglob("*")} - before
        if not verdict.problem:
            verdict = replace(verdict, problem=_left_over(left, verdict.code))
        return replace(verdict, words=tuple(made.words))


def files_of(given: Fuzzed) -> Made:
    """What an input consists of, to keep it."""
    rng = random.Random(given.seed)  # noqa: S311 - as above
    return KINDS[given.kind](rng, given.values)[0]


def _left_over(left: set[str], code: int) -> str:
    """Drafts, and files of a command that failed."""
    drafts = sorted(name for name in left if Path(name).name.startswith("."))
    if drafts or (code and any(Path(name).is_file() for name in left)):
        return f"left behind: {', '.join(sorted(left))}"
    return ""


def command(main: Callable[[], object], made: Made) -> Callable[[], object]:
    """A command of ours with these words."""

    def run() -> None:
        sys.argv = [main.__module__.partition(".")[0], *made.words]
        main()

    return run


Trial = tuple[Made, Callable[[], object]]
_SMALL = ("-m", "small.toml", "-g", "4")
_MODEL = b"""\
name = "small"
kind = "transformer"
source = "none"
layers = 2
hidden = 64
heads = 4
ffn = 128
vocab = 100
seq_len = 32
"""


def _asked(rng: random.Random) -> list[str]:
    """A command that reads a cluster and a model."""
    name = rng.choice(("run", "run", "run", "show", "goodput"))
    words = [name, "-s", rng.choice(made_of.STRATEGIES)]
    words += ["--json"] if name != "show" and rng.random() < 0.4 else []  # noqa: PLR2004
    words += ["--tokens", "1e9"] if name == "run" and rng.random() < 0.4 else []  # noqa: PLR2004
    return words + (["--set", "failures=meta-rsc-1"] if name == "goodput" else [])


def cluster(rng: random.Random, drawn: tuple[Any, ...]) -> Trial:
    """A cluster from others, with its own GPU beside it now and then."""
    tree = dict(rng.choice(made_of.catalog("clusters")))
    files = {"small.toml": _MODEL}
    if rng.random() < 0.3:  # noqa: PLR2004
        gpu = rng.choice(made_of.catalog("gpus"))
        if rng.random() < 0.5:  # noqa: PLR2004
            tree["gpu"] = gpu
        else:
            tree["gpu"] = "gpu.toml"
            files["gpu.toml"] = made_of.mutated(gpu, rng, drawn, made_of.as_toml)
    if rng.random() < 0.2:  # noqa: PLR2004
        tree["failures"] = rng.choice(made_of.catalog("failures"))
    files["cluster.toml"] = made_of.mutated(tree, rng, drawn, made_of.as_toml)
    if rng.random() < 0.1:  # noqa: PLR2004
        made = Made(files, ["list", "./cluster.toml"])
    else:
        made = Made(files, [*_asked(rng), "-c", "cluster.toml", *_SMALL])
    return made, command(co2sim, made)


def model(rng: random.Random, drawn: tuple[Any, ...]) -> Trial:
    """A model from others."""
    small = rng.random() < 0.5  # noqa: PLR2004
    tree = _parsed_model() if small else rng.choice(made_of.catalog("models"))
    files = {"model.toml": made_of.mutated(tree, rng, drawn, made_of.as_toml)}
    made = Made(files, [*_asked(rng), "-c", "dgx-h100", "-m", "model.toml", "-g", "8"])
    return made, command(co2sim, made)


@cache
def _parsed_model() -> dict[str, Any]:
    return made_of.tomllib.loads(_MODEL.decode())


def config(rng: random.Random, drawn: tuple[Any, ...]) -> Trial:
    """A `config.json` of Hugging Face, by its name or by its folder."""
    tree = rng.choice(list(made_of.HF.values()))
    files = {"hf/config.json": made_of.mutated(tree, rng, drawn, made_of.as_json)}
    where = rng.choice(("hf", "hf/config.json"))
    made = Made(files, [*_asked(rng), "-c", "dgx-h100", "-m", where, "-g", "8"])
    return made, command(co2sim, made)


_TIERS = b"[inter.rail]\nnodes = 4\noversubscription = 2\n[inter.spine]\nnodes = 8\n"
"""What the example of a cluster has not."""


def option(rng: random.Random, drawn: tuple[Any, ...]) -> Trial:  # noqa: ARG001 - as the others
    """Options with any value, `--set` most of all."""
    chosen = rng.choice(("dgx-h100", "cluster.toml", "two-sites-wan"))
    words = [*_asked(rng), "-c", chosen, "-m", "small.toml"]
    words += overrides(rng, rng.choice((1, 1, 2, 3)))
    for name in ("--gpus", "--micro-batch", "--accumulation", "--global-batch", "--seed"):
        if rng.random() < 0.03:  # noqa: PLR2004
            words += [name, rng.choice([*made_of.NUMBERS, *made_of.TEXTS]).replace("\0", "")]
    if rng.random() < 0.1:  # noqa: PLR2004
        words[words.index("-s") + 1] += rng.choice((":", ",", "")) + made_of.number(rng)
    example = (made_of.ROOT / "examples" / "my-cluster.toml").read_bytes()
    if rng.random() < 0.3:  # noqa: PLR2004
        example += _TIERS
    words = [word.replace("\0", "") for word in words]  # no word of a command line can have it
    made = Made({"small.toml": _MODEL, "cluster.toml": example}, words)
    return made, command(co2sim, made)


def several(rng: random.Random, drawn: tuple[Any, ...]) -> Trial:  # noqa: ARG001 - as the others
    """Commands that simulate several cases, with one odd word."""
    number = rng.choice(("inter.bandwidth", "gpus", "micro_batch", "strategy.tau", "gpu.tdp"))
    words = {
        "scale": ["-g", "2,4,8", "-c", "dgx-h100"],
        "sweep": ["--vary", f"{number}=1,2", "-c", "dgx-h100", "-g", "8", "--jobs", "1"],
        "solve": [number, "--for", "efficiency=90%", "-c", "dgx-h100", "-g", "8"],
        "plan": ["--tokens", "1e9", "-c", "dgx-h100", "-g", "8", "--jobs", "1"],
    }
    name = rng.choice(list(words))
    asked = [name, *words[name], "-m", "small.toml", "-s", rng.choice(made_of.STRATEGIES)]
    at = rng.randrange(1, len(asked))
    key, equals, _ = asked[at].rpartition("=")
    odd = rng.choice([made_of.number(rng), *made_of.NUMBERS, *made_of.TEXTS])
    asked[at] = f"{key}{equals}{odd}".replace("\0", "")
    made = Made({"small.toml": _MODEL}, asked)
    return made, command(co2sim, made)


def published(rng: random.Random, drawn: tuple[Any, ...]) -> Trial:
    """Published cells, and how a paper says that they are simulated."""
    key = rng.choice(("co2", "zeropp"))
    folder = made_of.ROOT / "papers" / key
    files = {}
    for name in ("results.toml", "paper.toml"):
        tree = made_of.tomllib.loads((folder / name).read_text("utf-8"))
        if name == "results.toml":
            tree["cell"] = rng.sample(tree["cell"], min(3, len(tree["cell"])))
        files[name] = made_of.mutated(tree, rng, drawn, made_of.as_toml)
    made = Made(files, ["read_speeds", "results.toml"])
    return made, lambda: read_speeds(Path("results.toml"))


_TABLES = (
    """\
gpus,global_batch,micro_batch,hidden,heads,layers,seq_len,iteration_ms
2,4,1,1024,16,12,1024,92.413677
2,4,1,1024,16,16,1024,117.906425
""",
    """\
method,network,tau,gpus,words_per_s,scalability_16_to_128,note
adamw_zero2,80 Gbit/s TCP/IP,,8,18444,,single node: no inter-node traffic
adamw_zero2,80 Gbit/s TCP/IP,,16,3488,,
""",
    """\
model_params_b,tokens_per_gpu,ib_links_100gbps_per_node,zero3_tflops_per_gpu,zeropp_tflops_per_gpu
18,1024,1,14,31
49,1024,1,11,22
""",
)


def cells(rng: random.Random, drawn: tuple[Any, ...]) -> Trial:
    """A table of published results."""
    lines = [line.split(",") for line in rng.choice(_TABLES).splitlines()]
    if rng.random() < 0.6:  # noqa: PLR2004
        row = rng.choice(lines)
        row[rng.randrange(len(row))] = str(made_of.value(rng, drawn))
    text = "\n".join(",".join(row) for row in lines).encode("utf-8", "surrogatepass")
    made = Made({"cells.csv": made_of.bytewise(text, rng)}, ["from_csv", "cells.csv"])
    return made, lambda: from_csv(Path("cells.csv"), "check")


def run_folder(rng: random.Random, drawn: tuple[Any, ...]) -> Trial:
    """The folder of a run: `run.json`, `trace.jsonl`, or both."""
    run, trace = _recorded()
    which = rng.randrange(3)
    files = {"run/run.json": run, "run/trace.jsonl": trace}
    if which != 1:
        files["run/run.json"] = made_of.mutated(json.loads(run), rng, drawn, made_of.as_json)
    if which != 0:
        files["run/trace.jsonl"] = _changed_lines(trace, rng, drawn)
    words = ["compare", "run", *(["--json"] if rng.random() < 0.5 else [])]  # noqa: PLR2004
    if rng.random() < 0.2:  # noqa: PLR2004
        words += [word.replace("\0", "") for word in overrides(rng, 1)]
    made = Made(files, words)
    return made, command(co2analysis, made)


def _changed_lines(trace: bytes, rng: random.Random, drawn: tuple[Any, ...]) -> bytes:
    lines = trace.splitlines()
    at = 0 if rng.random() < 0.3 else rng.randrange(len(lines))  # noqa: PLR2004
    match rng.randrange(4):
        case 0:
            return made_of.bytewise(trace, rng)
        case 1:
            del lines[at]
        case 2:
            lines.insert(at, rng.choice(lines))
        case _:
            lines[at] = made_of.as_json(made_of.changed(json.loads(lines[at]), rng, drawn))
    return b"\n".join(lines)


@cache
def _recorded() -> tuple[bytes, bytes]:
    """A simulated run, as if it had been measured."""
    built = load_cluster("dgx-h100", {}).value
    block = Block("layer", (64, 64), 1e6, 1e4, products=(MatMul(8, 8, 8),), calls=2)
    case = Case(
        cluster=replace(built, nodes=2, gpus_per_node=2),
        model=Model("tiny", (block, replace(block, name="head")), 8),
        strategy="co2(tau=2)",
        precision="bf16",
    )
    _, trace = study.trace(replace(case, fold=False))
    found = Record(
        case=case,
        kernels="sleep",
        rounds=1,
        trace=trace,
        clock_error=1e-6,
        figures=study.run(case).to_dict(),
        environment={"torch": "2"},
    )
    with tempfile.TemporaryDirectory() as name:
        record.write(Path(name), found)
        return (Path(name) / "run.json").read_bytes(), (Path(name) / "trace.jsonl").read_bytes()


KINDS: dict[str, Callable[[random.Random, tuple[Any, ...]], Trial]] = {
    "cluster": cluster,
    "model": model,
    "config": config,
    "option": option,
    "published": published,
    "cells": cells,
    "run": run_folder,
    "study": several,
    "checkpoint": fuzz_checkpoints.damaged,
}
if find_spec("chakra"):  # of an extra
    KINDS["chakra"] = lambda rng, drawn: (
        made := fuzz_chakra.damaged(rng, drawn),
        command(co2sim, made),
    )
