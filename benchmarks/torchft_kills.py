"""Kill workers at random times, under torchrun and torchft, and see that training goes on alike.

    python benchmarks/torchft_kills.py            # 20 kills in each of two trainings: half an hour
    python benchmarks/torchft_kills.py --quick    # one kill, of three workers

Every worker is a replica group with a torchrun of its own, which starts it again. The next kill
comes when all are back. Every worker notes each step, and a hash of its anchor after each round.
Writes torchft_kills.md; needs the extra `torchft`.
"""

import argparse
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from reports import folder, installed, machine, made_by, parser, table
from torch import nn

from realrun.algorithms import CO2, DiLoCo, LocalUpdate

ALGORITHMS: dict[str, Callable[..., LocalUpdate]] = {"CO2": CO2.published, "DiLoCo": DiLoCo}
OPTIONS: dict[str, Any] = {"tau": 8, "outer_momentum": 0.5, "outer_lr": 0.5}
WORKERS, KILLS = 4, 20
HIDDEN = 1024
PAUSE = 0.01
"""Seconds that a step sleeps, as if a GPU computed."""
LIMIT, QUORUM, HEARTBEAT, STRAGGLERS = 5, 300, 2, 20
"""Seconds: of a collective, of a quorum, without a heartbeat, and for those that come late."""
PATIENCE = 300.0
"""Seconds until a worker that was killed must be back."""
_STAY = "until"
COLUMNS = ["worker", "t", "pid", "what", "round", "used", "workers", "hash"]
"""Of a note, and who made it."""


# --- a worker ------------------------------------------------------------------------------------


def work(name: str, out: Path) -> None:
    """Be a worker, until the file says that it is enough."""
    from torchft import Manager, ProcessGroupGloo  # noqa: PLC0415 - may be missing

    from realrun.adapters.torchft import fault_tolerant  # noqa: PLC0415 - as above

    number = int(os.environ["REPLICA_GROUP_ID"])
    limit = timedelta(seconds=LIMIT)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=2,
        use_async_quorum=False,
        timeout=limit,
        quorum_timeout=timedelta(seconds=QUORUM),
        replica_id=f"worker{number}_",
    )
    torch.set_num_threads(1)
    torch.manual_seed(number)  # of who is alone: the others take its weights
    model = nn.Sequential(nn.Linear(64, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
    model.append(nn.Linear(HIDDEN, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(time.time_ns())
    with (out / f"{number}.jsonl").open("a", buffering=1) as log:

        def note(what: str, **more: Any) -> None:
            line = {"t": time.time(), "pid": os.getpid(), "what": what, **more}
            log.write(json.dumps(line) + "\n")

        note("made")
        kind = ALGORITHMS[name]
        with fault_tolerant(manager, kind, model, optimizer, **OPTIONS) as training:
            note("joined", round=training.stats().rounds)
            while training.stats().rounds < int((out / _STAY).read_text()):
                inputs = torch.randn(4, 64, generator=draw)
                optimizer.zero_grad()
                wanted = inputs.sum(1, keepdim=True).sin()
                nn.functional.mse_loss(model(inputs), wanted).backward()
                time.sleep(PAUSE)
                optimizer.step()
                done = training.stats()
                note("step", round=done.rounds)
                if done.steps % OPTIONS["tau"] == 0:
                    note("round", **_state(training, manager))
        note("end", **_state(training, manager))
    manager.shutdown(wait=False)
    os._exit(0)  # torchft takes seconds to end


def _state(training: LocalUpdate, manager: Any) -> dict[str, Any]:
    """What is compared, and what torchft has counted."""
    anchor = training.loop.state.anchor
    return {
        "round": training.stats().rounds,
        "used": manager.current_step(),
        "workers": manager.num_participants(),
        "hash": hashlib.sha256(anchor.numpy().tobytes()).hexdigest()[:16],
    }


# --- those who start and kill them ---------------------------------------------------------------


@dataclass
class Fleet:
    """Workers, and what they have noted."""

    out: Path
    processes: "list[subprocess.Popen[bytes]]"

    def notes(self, since: float = 0.0) -> pd.DataFrame:
        """Notes of all workers since a time; a line that is half written is left out."""
        rows = []
        for worker in range(len(self.processes)):
            path = self.out / f"{worker}.jsonl"
            for line in path.read_text().splitlines() if path.exists() else []:
                with suppress(json.JSONDecodeError):
                    rows.append({"worker": worker, **json.loads(line)})
        frame = pd.DataFrame(rows, columns=COLUMNS)
        return frame[frame["t"] > since]

    def together(self, since: float = 0.0) -> bool:
        """Whether each has ended a round with all others, since a time."""
        notes, everybody = self.notes(since), len(self.processes)
        whole = notes[(notes["what"] == "round") & (notes["workers"] == everybody)]
        return whole["worker"].nunique() == everybody

    def back(self, since: float) -> bool:
        """Whether all have ended a round together after a worker came back."""
        notes = self.notes(since)
        joined = notes.loc[notes["what"] == "joined", "t"]
        return len(joined) > 0 and self.together(joined.max())

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until it is so. Raises TimeoutError."""
        end = time.monotonic() + PATIENCE
        while not ready():
            ended = [each.returncode for each in self.processes if each.poll() is not None]
            if ended or time.monotonic() > end:
                raise TimeoutError(f"{what}: not within {PATIENCE:g} s; exit codes {ended}")
            time.sleep(0.1)


def _started(words: Sequence[str], log: Path, **environment: str) -> "subprocess.Popen[bytes]":
    with log.open("wb") as told:
        return subprocess.Popen(words, stdout=told, stderr=told, env=os.environ | environment)


@contextmanager
def started(name: str, workers: int, out: Path) -> Iterator[Fleet]:
    """A lighthouse, which tells its address at its start, and a torchrun for every worker."""
    (out / _STAY).write_text(str(10**9))
    words = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--bind", "[::]:0"]
    words += ["--min_replicas", "2", "--heartbeat_timeout_ms", f"{HEARTBEAT * 1000}"]
    words += ["--join_timeout_ms", f"{STRAGGLERS * 1000}"]
    log = out / "lighthouse.txt"
    lighthouse, fleet = _started(words, log), Fleet(out, [])
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    words += ["--max-restarts=1000", __file__, "--worker", name, "--out", str(out)]
    try:
        while not (port := re.search(r"listening on: \S+:(\d+)\n", log.read_text())):
            if lighthouse.poll() is not None:
                raise RuntimeError(f"the lighthouse ended: {log.read_text()[-500:]}")
            time.sleep(0.05)
        for worker in range(workers):
            names = {"REPLICA_GROUP_ID": str(worker), "OMP_NUM_THREADS": "1"}
            names["TORCHFT_LIGHTHOUSE"] = f"http://localhost:{port[1]}"
            fleet.processes.append(_started(words, out / f"{worker}.txt", **names))
        yield fleet
    finally:
        for each in (*fleet.processes, lighthouse):
            each.terminate()
        for each in (*fleet.processes, lighthouse):
            each.wait()


def kill(fleet: Fleet, worker: int) -> float:
    """Kill a worker; gives the time."""
    notes = fleet.notes()
    pid = notes.loc[notes["worker"] == worker, "pid"].iloc[-1]
    now = time.time()
    os.kill(int(pid), signal.SIGKILL)
    return now


def told(fleet: Fleet, victim: int, since: float) -> dict[str, Any]:
    """What became of a kill, from the notes of all."""
    notes = fleet.notes(since - 60)
    later = notes[notes["t"] > since]
    steps, rounds = (notes[notes["what"] == what] for what in ("step", "round"))
    own = later[later["worker"] == victim]
    back = own.loc[own["what"] == "step", "t"].min() - since
    row: dict[str, Any] = {"worker": victim, "pause": 0.0, "dropped": 0.0, "back": back, "lost": 0}
    for survivor in set(range(len(fleet.processes))) - {victim}:
        times = steps.loc[steps["worker"] == survivor, "t"]
        row["pause"] = max(row["pause"], times[times >= times[times <= since].max()].diff().max())
        mine = rounds[rounds["worker"] == survivor]
        fewer = mine[(mine["t"] > since) & (mine["workers"] < len(fleet.processes))]
        row["dropped"] = max(row["dropped"], fewer["t"].min() - since if len(fewer) else back)
        counts = mine[["round", "used"]]
        passed, used = counts.iloc[-1] - counts[mine["t"] <= since].iloc[-1]
        row["lost"] = max(row["lost"], int(passed - used))
    joined = own.loc[own["what"] == "joined", "round"].iloc[-1]
    anchors = rounds[rounds["round"] > joined].groupby("round")["hash"].nunique()
    row["equal"] = bool(len(anchors) and (anchors == 1).all())
    if (starts := (later["what"] == "made").sum()) != 1:
        row |= {"equal": False, "error": f"{starts} workers were started"}
    return row


def tried(name: str, workers: int, kills: int, seed: int, out: Path) -> list[dict[str, Any]]:
    """A training with some kills; a row for each, the last of which knows of the end, too."""
    draw = random.Random(f"{seed} {name}")  # noqa: S311 - repeatable, not secret
    rows: list[dict[str, Any]] = []
    with started(name, workers, out) as fleet:
        fleet.wait(fleet.together, "the first round of all")
        begin = time.time()
        for count in range(1, kills + 1):
            time.sleep(draw.uniform(0.2, 4.0))
            victim = draw.randrange(workers)
            now = kill(fleet, victim)
            row = {"algorithm": name, "kill": count, "at": now - begin}
            try:
                fleet.wait(partial(fleet.back, now), f"kill {count} of {name}")
                time.sleep(1.0)
                rows.append(row | told(fleet, victim, now))
            except TimeoutError as error:
                rows.append(row | {"worker": victim, "error": str(error), "equal": False})
                break
            print(rows[-1], file=sys.stderr, flush=True)
        (out / _STAY).write_text(str(int(fleet.notes()["round"].max()) + 40))
        codes = [each.wait(PATIENCE) for each in fleet.processes]
        ends = fleet.notes().groupby("worker")["hash"].last()
        rows[-1]["ended"] = codes == [0] * workers and len(set(ends)) == 1
    return rows


# --- what it says --------------------------------------------------------------------------------


def report(rows: Sequence[dict[str, Any]], workers: int) -> str:
    """The table in Markdown."""
    seconds = {
        "at, s": "at",
        "longest pause of a survivor, s": "pause",
        "dropped by all after, s": "dropped",
        "back after, s": "back",
    }
    cells = [
        {
            **{name: str(row[name]) for name in ("algorithm", "kill", "worker")},
            **{
                title: f"{row[name]:.1f}" if name in row else "-" for title, name in seconds.items()
            },
            "averages lost": str(row.get("lost", "-")),
            "anchors equal": "yes" if row["equal"] else row.get("error", "no"),
        }
        for row in rows
    ]
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    ends = [row for row in rows if "ended" in row]
    well = sum(row["equal"] for row in rows)
    pauses = sorted(row["pause"] for row in rows if "pause" in row)
    return f"""\
# Workers killed at random times

{workers} workers of {", ".join(names)} under torchrun (`--standalone --max-restarts`) and torchft\
 {installed("torchft-nightly")}, rounds of {OPTIONS["tau"]} steps,\
 a model of {HIDDEN * HIDDEN + 67 * HIDDEN + 1:,} parameters. Who has not told for\
 {HEARTBEAT} s that it lives is dead; an average may take {LIMIT} s. {machine()}

**{well} of {len(rows)} kills**: training went on, the worker came back, and all anchors were equal\
 bit for bit after every round since. {sum(row["ended"] for row in ends)} of {len(names)} trainings\
 ended with exit code 0 and the same anchor on all workers. The longest pause of a survivor was\
 {pauses[len(pauses) // 2]:.1f} s in the middle and {pauses[-1]:.1f} s at most.

{table(cells)}

{made_by()}
"""


def main() -> None:
    """Start workers and kill them, or be one of them."""
    command = parser(__doc__, "one kill, of three workers with CO2")
    command.add_argument("--kills", type=int, default=KILLS, help="of each algorithm")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--worker", help=argparse.SUPPRESS)
    options = command.parse_args()
    if options.worker:
        work(options.worker, options.out)
        return
    names, workers, kills = list(ALGORITHMS), WORKERS, options.kills
    if options.quick:
        names, workers, kills = ["CO2"], 3, 1
    rows = []
    with folder(options) as out:
        for name in names:
            with tempfile.TemporaryDirectory() as scratch:
                rows += tried(name, workers, kills, options.seed, Path(scratch))
        words = report(rows, workers)
        (out / "torchft_kills.md").write_text(words)
    print(words)


if __name__ == "__main__":
    main()
