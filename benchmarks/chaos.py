"""Let faults befall runs, trainings, labs and studies at random times, and count what goes wrong.

    python benchmarks/chaos.py            # 200 trials, about two hours on two cores; root for all
    python benchmarks/chaos.py --quick    # one trial of each kind of command

A trial starts a command, hits a rank or the launcher at a random time, and checks: it ends in time,
with the right exit code and one line that names the rank; there is no traceback, and no process is
left. A training and a study then go on, and end with the same bytes as one that nothing befell.
Trials are drawn from a seed: trial N of a seed is the same, however many there are. Those that
fail keep their folder in out/chaos. Writes chaos.md.
"""

import ctypes
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import psutil
from reports import folder, machine, made_by, parser, table

from realrun.launch.monitor import SILENT
from realrun.train.log import read

TARGETS = ("run", "train", "sweep", "lab run", "lab train")
STRATEGIES = (
    *("ddp", "zero1", "zero3", "zeropp", "fsdp", "local_sgd:tau=4", "slowmo:tau=4"),
    *("diloco:tau=4,fragments=2,delay=2", "overlap_local_sgd:tau=4", "co2.published:tau=4"),
    "co2:tau=4,delay=2,fragments=2",
)
SIGNALS = {
    "rank killed": signal.SIGKILL,
    "rank stopped": signal.SIGSTOP,
    "launcher killed": signal.SIGKILL,
    "launcher told to end": signal.SIGTERM,
    "launcher interrupted": signal.SIGINT,
}
"""Faults, beside a full disk."""
FULL = "disk full"
STEPS, EVERY = 40, 10
DEADLINE = 25.0
"""Seconds that ranks wait for each other."""
SPARE, LONGEST = 30.0, 600.0
"""Seconds to notice, to end and to tidy up; and of a command that nothing befalls."""
_LONGEST_LINE = 480
"""Characters of a line of error: 400, and the rank in front."""
_DISK, _FREE = 64, 1_500_000
"""MiB of the small disk, and bytes that are left free on it at most."""
_CLUSTER = """\
name = "slow loopback"
source = "for trials of faults"
nodes = 1
gpus_per_node = 2
gpu = "virtual"
backend = "gloo"
intra = { bandwidth = "1 GB/s", latency = "50 us" }
inter = { bandwidth = "1 GB/s", latency = "50 us" }
"""


@dataclass(frozen=True, slots=True)
class Trial:
    """One command, and what befalls it when the share `when` of its usual time has passed."""

    number: int
    target: str
    strategy: str
    fault: str
    when: float
    victim: int
    amount: float


def drawn(seed: int, number: int) -> Trial:
    """A trial of a seed."""
    rng = random.Random(f"{seed} {number}")  # noqa: S311 - repeatable, not secret
    target = TARGETS[number % len(TARGETS)]
    faults = [name for name in SIGNALS if target != "sweep" or name.startswith("launcher")]
    fault = rng.choice([*faults, *([] if target.startswith("lab") else [FULL])])
    strategy = "" if target == "sweep" else rng.choice(STRATEGIES)
    return Trial(number, target, strategy, fault, rng.random(), rng.randrange(2), rng.random())


def words_of(target: str, strategy: str, *more: str) -> list[str]:
    """The command of a trial, which writes into the folder "out"."""
    limit = ["--deadline", f"{DEADLINE:g} s", "--out", "out"]
    run = ["realrun", "run", "-m", "tiny-5m", "-s", strategy, "--set", "model.layers=2"]
    run += ["--rounds", "3", "--kernels", "sleep", *limit]
    train = ["realrun", "train", "--size", "tiny", "--context", "16", "--batch", "12"]
    train += ["--steps", str(STEPS), "--eval-every", "20", "--log-every", "1", "-s", strategy]
    train += ["--checkpoint-every", str(EVERY), *limit]
    lab = ["realrun", "lab", "run", "--nodes", "2", "--rate", "1 Gbit/s", "--"]
    sweep = ["co2sim", "sweep", "-c", "dgx-h100", "-m", "gpt2-small", "-g", "8", "--jobs", "2"]
    sweep += ["--vary", "strategy=ddp, zero3, co2.published:tau=4", "--out", "out"]
    sweep += ["--vary", f"inter.bandwidth={', '.join(f'{n} Gbit/s' for n in range(20, 420, 20))}"]
    found = {
        "run": [*run, "-c", "cluster.toml", "--nproc", "2"],
        "train": [*train, "--nproc", "2"],
        "sweep": sweep,
        "lab run": [*lab, *run],
        "lab train": [*lab, *train],
    }
    return [sys.executable, "-m", *found[target], *more]


@dataclass
class Command:
    """A command that runs in a folder."""

    process: "subprocess.Popen[bytes]"
    place: Path

    def wrote(self, stream: str) -> str:
        """What it has written to "stdout" or "stderr"."""
        return (self.place / stream).read_text("utf-8", errors="replace")

    def ended(self, seconds: float) -> bool:
        """Wait so long for the end; whether it came."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode is not None

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes of ranks that live, by rank."""
        found: dict[int, psutil.Process] = {}
        with suppress(psutil.Error):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.Error, ValueError):
                    rank = process.environ().get("RANK")
                    if rank is not None and process.status() != psutil.STATUS_ZOMBIE:
                        found.setdefault(int(rank), process)
        return found


def started(place: Path, words: Sequence[str]) -> Command:
    """Start a command; its temporary files lie in the folder, too."""
    for name in ("out", "tmp"):
        (place / name).mkdir(parents=True, exist_ok=True)
    (place / "cluster.toml").write_text(_CLUSTER)
    own = {"OMP_NUM_THREADS": "1", "TMPDIR": str(place / "tmp"), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with (place / "stdout").open("wb") as out, (place / "stderr").open("wb") as err:
        process = subprocess.Popen(
            words, cwd=place, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            env=os.environ | own, start_new_session=True,
        )  # fmt: skip
    return Command(process, place)


def left(seconds: float = 0.0) -> list[psutil.Process]:
    """What lives of all that was started, after at most so long: orphans become our children."""
    until = time.monotonic() + seconds
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        found = psutil.Process().children(recursive=True)
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.1)


def kill_all() -> None:
    """Kill all that was started."""
    for process in left():
        with suppress(psutil.Error):
            process.kill()
    left(10.0)


@cache
def reference(target: str, strategy: str, base: Path) -> tuple[Path, float]:
    """The folder of a command that nothing befalls, and its seconds."""
    place = base / "references" / re.sub(r"\W", "-", f"{target} {strategy}")
    shutil.rmtree(place, ignore_errors=True)
    began = time.monotonic()
    one = started(place, words_of(target, strategy))
    if not one.ended(LONGEST) or one.process.returncode:
        kill_all()
        raise RuntimeError(f"undisturbed, {target} {strategy} failed: {one.wrote('stderr')}")
    return place / "out", time.monotonic() - began


@contextmanager
def small_disk(trial: Trial, place: Path) -> Iterator[None]:
    """A disk of its own for what a command writes, where it is to be filled."""
    if trial.fault != FULL:
        yield
        return
    out = place / "out"
    out.mkdir(parents=True)
    tools = {name: shutil.which(name) or name for name in ("mount", "umount")}
    size = f"size={_DISK}m"
    subprocess.run([tools["mount"], "-t", "tmpfs", "-o", size, "chaos", str(out)], check=True)
    try:
        yield
    finally:
        subprocess.run([tools["umount"], str(out)], check=True)


def befall(trial: Trial, one: Command, seconds: float) -> bool:
    """Wait until it is time, and do it; False if the command had ended, or there was no rank."""
    if one.ended(trial.when * seconds):
        return False
    if trial.fault == FULL:
        out = one.place / "out"
        disk = os.statvfs(out)
        rest = disk.f_bavail * disk.f_frsize - int(trial.amount * _FREE)
        with (out / "filler").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(rest, 1))
        return True
    process: psutil.Process | None = psutil.Process(one.process.pid)
    if trial.fault.startswith("rank"):
        until = time.monotonic() + 60
        while (process := one.ranks().get(trial.victim)) is None and time.monotonic() < until:
            if one.ended(0.05):
                return False
    with suppress(psutil.NoSuchProcess):
        if process is not None:
            process.send_signal(SIGNALS[trial.fault])
            return True
    return False


def codes(trial: Trial, *, hit: bool) -> set[int]:
    """The exit codes that are right."""
    if not hit:
        return {0}
    return {
        "rank killed": {1},
        "rank stopped": {1},
        "launcher killed": {-signal.SIGKILL},
        # Before a command has its handlers, the signal itself ends it.
        "launcher told to end": {143, -signal.SIGTERM},
        "launcher interrupted": {130, -signal.SIGINT},
        FULL: {0, 1, 2},
    }[trial.fault]


def judge(trial: Trial, one: Command, *, hit: bool) -> Iterator[str]:
    """What is wrong with the end of a command."""
    code, said = one.process.returncode, one.wrote("stderr")
    last = " / ".join(said.splitlines()[-4:])
    errors = [line for line in said.splitlines() if "error: " in line]
    allowed = codes(trial, hit=hit)
    if re.search(r"Traceback|terminate called|core dumped", said + one.wrote("stdout")):
        yield f"more than a line: {last}"
    if code not in allowed | {0} or (code == 0 and 0 not in allowed and not finished(trial, one)):
        yield f"exit code {code}, not {' or '.join(map(str, sorted(allowed)))}: {last}"
    if any(len(line) > _LONGEST_LINE for line in errors):
        yield f"a line of error has {max(map(len, errors))} characters"
    named = {
        "rank killed": rf"rank {trial.victim}\b.*SIGKILL",
        "rank stopped": rf"rank {trial.victim}\b",
        FULL: "(?i)no space left",
    }.get(trial.fault, "")
    if code in {1, 2} and not any(re.search(named, line) for line in errors):
        yield f"no line of error says {named!r}: {last}"


def finished(trial: Trial, one: Command) -> bool:
    """Whether all work was done before the fault could tell."""
    if trial.target.endswith("train"):
        return (one.place / "out" / f"checkpoints/step-{STEPS:06d}").exists()
    return trial.target == "sweep" or "timeline " in one.wrote("stdout")


def goes_on(trial: Trial, one: Command, base: Path) -> str:
    """Go on with a training or a study; the end must be that of an undisturbed one."""
    whole, _ = reference(trial.target, trial.strategy, base)
    there = (one.place / "out" / "log.csv").exists()
    more = ["--resume"] if trial.target.endswith("train") and there else []
    again = started(one.place, words_of(trial.target, trial.strategy, *more))
    if not again.ended(LONGEST) or again.process.returncode:
        kill_all()
        return f"it does not go on: {again.process.returncode}, {again.wrote('stderr')[-300:]}"
    drafts = [path.name for path in (one.place / "out").rglob(".*")]
    return differences(one.place / "out", whole) or (f"drafts: {drafts}" if drafts else "")


def differences(out: Path, whole: Path) -> str:
    """What differs between two finished trainings or studies, but for seconds."""
    if not (whole / "log.csv").exists():
        frames = [pd.read_parquet(path).astype(str) for path in (out, whole)]
        one, other = (f.sort_values(list(f.columns), ignore_index=True) for f in frames)
        return "" if one.equals(other) else "the study's figures differ"
    rows = [
        [(row.step, row.train_loss, row.validation_loss) for row in read(path)]
        for path in (out, whole)
    ]
    if repr(rows[0]) != repr(rows[1]):
        return "the logs differ"
    last = f"checkpoints/step-{STEPS:06d}"
    saved = [path.name for path in (whole / last).glob("*.safetensors")]
    found = [
        (out / last / name).read_bytes() == (whole / last / name).read_bytes() for name in saved
    ]
    return "" if found and all(found) else f"of {saved} these are the same: {found}"


def tried(trial: Trial, base: Path) -> dict[str, Any]:
    """Make a trial; what it was, whether it hit anything, and what is wrong ("": nothing)."""
    _, seconds = reference(trial.target, trial.strategy, base)
    place = base / f"{trial.number}"
    shutil.rmtree(place, ignore_errors=True)
    with small_disk(trial, place):
        one = started(place, words_of(trial.target, trial.strategy))
        hit = befall(trial, one, seconds)
        problem, since = "", time.monotonic()
        if not one.ended(seconds + max(DEADLINE, SILENT) + SPARE):
            problem = "it has not ended in time"
        took = time.monotonic() - since
        if not problem and (found := left(SPARE)):
            problem = f"left behind: {' '.join(found[0].cmdline())[:200]}"
        kill_all()
        problem = problem or next(judge(trial, one, hit=hit), "")[:400]
        (place / "out" / "filler").unlink(missing_ok=True)
        if not problem and (trial.target.endswith("train") or trial.target == "sweep"):
            problem = goes_on(trial, one, base)
            kill_all()
    if not problem:
        shutil.rmtree(place)
    return asdict(trial) | {"hit": hit, "seconds": took, "problem": problem}


def report(found: list[dict[str, Any]], skipped: int, seed: int) -> str:
    """The page of results: counts by fault and target."""
    rows = []
    for fault in (*SIGNALS, FULL):
        row = {"fault": fault}
        for target in TARGETS:
            here = [one for one in found if (one["fault"], one["target"]) == (fault, target)]
            good = sum(not one["problem"] for one in here)
            row[target] = f"{good} of {len(here)}" if here else ""
        ends = [one["seconds"] for one in found if one["fault"] == fault and one["hit"]]
        row["median s"] = f"{median(ends):.1f}" if ends else ""
        row["longest s"] = f"{max(ends):.1f}" if ends else ""
        rows.append(row)
    failed = [one for one in found if one["problem"]]
    late = sum(not one["hit"] for one in found)
    lines = [f"- {o['number']}, {o['target']}, {o['fault']}: {o['problem']}" for o in failed]
    return f"""\
# Faults at random times

{len(found):,} trials of seed {seed}: {len(found) - len(failed):,} as they should be,\
 {len(failed)} not. In each a command of two ranks, or a study of two processes, is hit at a random\
 time from its start to its end; in {late} of them it had ended, or there was nothing to hit. It\
 must end in time with the right exit code and a line that names the rank, without a traceback, and\
 no process may be left. A training and a study then go on, and end with the same bytes as one that\
 nothing befell. Seconds are from the fault to the end. {skipped} others were not made: labs and\
 full disks need root. {machine()}

{table(rows)}

{os.linesep.join(lines) or "No trial failed."}

{made_by()}
"""


def main() -> int:
    """Make trials, and write the table; the exit code is 1 if any failed."""
    command = parser(__doc__, "five trials")
    command.add_argument("--trials", type=int, default=200, help="how many (200)")
    command.add_argument("--seed", type=int, default=119, help="which (119)")
    command.add_argument("--number", type=int, help="only this one")
    options = command.parse_args()
    trials = min(options.trials, len(TARGETS)) if options.quick else options.trials
    if ctypes.CDLL(None).prctl(36, 1):  # PR_SET_CHILD_SUBREAPER: orphans become our children
        sys.exit("the kernel keeps no orphans for us")
    found: list[dict[str, Any]] = []
    root, skipped = os.geteuid() == 0, 0
    with folder(options) as out, tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary) if options.quick else Path("out/chaos").absolute()
        for number in [options.number] if options.number is not None else range(trials):
            trial = drawn(options.seed, number)
            if not root and (trial.target.startswith("lab") or trial.fault == FULL):
                skipped += 1
                continue
            verdict = tried(trial, base)
            found.append(verdict)
            words = f"{number}: {trial.target} {trial.strategy}, {trial.fault} at {trial.when:.0%}"
            print(f"{words}: {verdict['problem'] or 'ok'}", file=sys.stderr, flush=True)
        text = report(found, skipped, options.seed)
        if options.out or not options.quick:
            (out / "chaos.md").write_text(text, "utf-8")
    print(text)
    return int(any(one["problem"] for one in found))


if __name__ == "__main__":
    sys.exit(main())
