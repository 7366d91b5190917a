"""The commands that faults hit, what they need, and what they leave when nothing befalls them."""

import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chaos_start
import psutil
from chaos_plan import Trial

from realrun.train.log import read

STEPS, EVERY, STOP = 40, 10, 30
DEADLINE, DEADLINE_PLAIN = 5.0, 25.0
"""Seconds that ranks wait for each other. Those that load torch each may start far apart."""
LONGEST = 240.0
"""Seconds after which a command that nothing befalls counts as hung."""

_CLUSTER = """
name = "slow loopback"
source = "for trials of faults"
nodes = 1
gpus_per_node = {ranks}
gpu = "virtual"
backend = "gloo"
intra = {{ bandwidth = "1 GB/s", latency = "50 us" }}
inter = {{ bandwidth = "1 GB/s", latency = "50 us" }}
"""
_VARIED = "25 Gbit/s, 50 Gbit/s, 100 Gbit/s, 200 Gbit/s, 400 Gbit/s"


def deadline(trial: Trial) -> float:
    """Seconds that ranks of a trial wait for each other."""
    return DEADLINE_PLAIN if trial.plain else DEADLINE


def command(trial: Trial, folder: Path, *more: str) -> list[str]:
    """The command of a trial, which writes into "out" of its folder."""
    limit = ["--deadline", f"{deadline(trial):g} s", "--out", "out"]
    where = ["--nproc", str(trial.ranks)]
    short = trial.strategy.replace("tau=4", "tau=2").replace("delay=2", "delay=1")
    run = ["run", "-m", "tiny-5m", "-s", short, "--set", "model.layers=2", "--rounds", "3"]
    run += ["--kernels", "sleep", *limit]
    train = ["train", "--size", "tiny", "--context", "16", "--batch", "12", "--steps", str(STEPS)]
    train += ["--eval-every", "20", "--log-every", "1", "-s", trial.strategy, *limit]
    kept = ["--checkpoint-every", str(EVERY)]
    lab = ["realrun", "lab", "run", "--nodes", str(trial.ranks), "--rate", "1 Gbit/s", "--"]
    match trial.target:
        case "run":
            (folder / "cluster.toml").write_text(_CLUSTER.format(ranks=trial.ranks))
            made = ["realrun", *run, "-c", "cluster.toml", *where]
        case "train":
            made = ["realrun", *train, *kept, *where]
        case "elastic":
            made = ["realrun", *train, "--elastic", *where]
        case "lab run":
            made = [*lab, "realrun", *run]
        case "lab train":
            made = [*lab, "realrun", *train, *kept]
        case "sweep":
            made = ["co2sim", "sweep", "-c", "dgx-h100", "-m", "gpt2-small", "--jobs", "2"]
            made += [
                "--vary",
                "strategy=ddp, zero3, co2:tau=4",
                "--vary",
                f"inter.bandwidth={_VARIED}",
            ]
            made += ["-g", "8", "--csv", "out/figures.csv"]
        case "explore --out":
            made = ["co2sim", "explore", "-c", "a100-tcp80", "-m", "gpt2-small", "-s", "ddp"]
            made += ["--vary", "gpus=8,16", "--vary", "micro_batch=1", "--jobs", "2"]
            made += ["--vary", "inter.latency=25 us", "--out", "out/page.html"]
        case _:
            made = ["co2sim", "explore"]
    return [*made, *more]


def started(
    trial: Trial, folder: Path, given: list[str], environment: dict[str, str] | None = None
) -> chaos_start.Command:
    """Start a command of a trial."""
    (folder / "out").mkdir(parents=True, exist_ok=True)
    own = {"OMP_NUM_THREADS": "1", **(environment or {})}
    return chaos_start.start(given, folder, plain=trial.plain, environment=own)


def ended(one: chaos_start.Command, limit: float) -> bool:
    """Wait until a command has ended; whether it did so in time."""
    until = time.monotonic() + limit
    while one.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    return one.code is not None


def kill_all() -> None:
    """Kill all that this process has started, whoever started it."""
    for _ in range(100):
        living = psutil.Process().children(recursive=True)
        if not living:
            return
        for one in living:
            with suppress(psutil.Error):
                one.kill()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


@dataclass(frozen=True)
class Reference:
    """A run that nothing befell: its folder, and the seconds that it took here."""

    folder: Path
    seconds: float


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def reference(trial: Trial, base: Path, *, stopped: bool = False) -> Reference:
    """The undisturbed run of a trial; made once. With `stopped` it ended early, to go on."""
    folder = base / "references" / (trial.name + ("-stopped" if stopped else ""))
    folder.parent.mkdir(parents=True, exist_ok=True)
    facts = folder / "facts.json"
    with _locked(folder.with_suffix(".lock")):
        if not facts.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            more = ["--stop", str(STOP)] if stopped else []
            began = time.monotonic()
            forked = Trial(
                **{name: getattr(trial, name) for name in trial.__slots__} | {"plain": False}
            )
            one = started(forked, folder, command(forked, folder, *more))
            if not ended(one, LONGEST) or one.code:
                kill_all()
                raise RuntimeError(f"undisturbed, {trial.name} ended with {one.code}: {one.said}")
            facts.write_text(json.dumps({"seconds": time.monotonic() - began}))
    return Reference(folder, json.loads(facts.read_text())["seconds"])


def differences(out: Path, other: Path) -> str:
    """What differs between two finished trainings, but for seconds; "" if nothing does."""
    import torch  # noqa: PLC0415 - loaded long ago

    def rows(folder: Path) -> list[Any]:
        return [
            (r.step, r.train_loss, r.validation_loss, r.accuracy, r.rounds) for r in read(folder)
        ]

    if repr(rows(out)) != repr(rows(other)):
        return "the logs differ"
    one, two = (torch.load(folder / "model.pt") for folder in (out, other))
    if one.keys() != two.keys() or not all(torch.equal(one[n], two[n]) for n in one):
        return "the parameters differ"
    if not all(math.isfinite(t.sum().item()) for t in one.values() if t.is_floating_point()):
        return "parameters are no numbers"
    last = f"checkpoints/step-{STEPS:06d}"
    for path in sorted((other / last).glob("*.safetensors")):
        if path.read_bytes() != (out / last / path.name).read_bytes():
            return f"{last}/{path.name} differs"
    return ""
