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
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

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
            log.write(
                json.dumps({"t": time.time(), "pid": os.getpid(), "what": what, **more}) + "\n"
            )

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

    def notes(self, number: int) -> list[dict[str, Any]]:
        """All notes of a worker; the last line may be half written, where it was killed."""
        path = self.out / f"{number}.jsonl"
        found = []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return found

    def together(self, since: float = 0.0) -> bool:
        """Whether each has ended a round with all others, since a time."""
        everybody = len(self.processes)
        return all(
            any(
                one["what"] == "round" and one["t"] > since and one["workers"] == everybody
                for one in reversed(self.notes(number))
            )
            for number in range(everybody)
        )

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until it is so. Raises TimeoutError."""
        end = time.monotonic() + PATIENCE
        while not ready():
            ended = [one.returncode for one in self.processes if one.poll() is not None]
            if ended or time.monotonic() > end:
                raise TimeoutError(f"{what}: not within {PATIENCE:g} s; exit codes {ended}")
            time.sleep(0.1)


def _lighthouse(out: Path) -> "tuple[subprocess.Popen[bytes], str]":
    """A lighthouse, and its address, which it tells at its start; it tells a lot."""
    words = [Path(sys.executable).with_name("torchft_lighthouse"), "--bind", "[::]:0"]
    words += ["--min_replicas", "2", "--heartbeat_timeout_ms", f"{HEARTBEAT * 1000}"]
    words += ["--join_timeout_ms", f"{STRAGGLERS * 1000}"]
    path = out / "lighthouse.txt"
    with path.open("wb") as told:
        made = subprocess.Popen(words, stdout=told, stderr=told)
    while not (found := re.search(r"listening on: \S+:(\d+)\n", path.read_text())):
        if made.poll() is not None:
            raise RuntimeError(f"the lighthouse ended: {path.read_text()[-500:]}")
        time.sleep(0.05)
    return made, f"http://localhost:{found[1]}"


@contextmanager
def started(name: str, workers: int, out: Path) -> Iterator[Fleet]:
    """A lighthouse, and a torchrun for every worker."""
    lighthouse, address = _lighthouse(out)
    (out / _STAY).write_text(str(10**9))
    fleet = Fleet(out, [])
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    words += ["--max-restarts=1000", __file__, "--worker", name, "--out", str(out)]
    try:
        for number in range(workers):
            with (out / f"{number}.txt").open("wb") as told:
                fleet.processes.append(
                    subprocess.Popen(
                        words,
                        stdout=told,
                        stderr=told,
                        env={
                            **os.environ,
                            "TORCHFT_LIGHTHOUSE": address,
                            "REPLICA_GROUP_ID": str(number),
                            "OMP_NUM_THREADS": "1",
                        },
                    )
                )
        yield fleet
    finally:
        for one in (*fleet.processes, lighthouse):
            one.terminate()
        for one in (*fleet.processes, lighthouse):
            one.wait()


def kill(fleet: Fleet, number: int) -> float:
    """Kill a worker; gives the time."""
    (pid,) = {one["pid"] for one in fleet.notes(number)[-1:]}
    now = time.time()
    os.kill(pid, signal.SIGKILL)
    return now


def told(fleet: Fleet, number: int, at: float) -> dict[str, Any]:
    """What became of a kill, from the notes of all."""
    everybody = range(len(fleet.processes))
    notes = {one: [note for note in fleet.notes(one) if note["t"] > at - 60] for one in everybody}
    own = [note for note in notes[number] if note["t"] > at]
    starts = sum(
        note["what"] == "made" for each in notes.values() for note in each if note["t"] > at
    )
    joined = [note for note in own if note["what"] == "joined"][-1]
    back = next(note["t"] for note in own if note["what"] == "step") - at
    survivors = [one for one in everybody if one != number]
    pauses, dropped, lost = [], [], []
    for one in survivors:
        steps = [note["t"] for note in notes[one] if note["what"] == "step"]
        first = next(i for i, t in enumerate(steps) if t > at) - 1
        pauses.append(max(b - a for a, b in pairwise(steps[max(0, first) :])))
        rounds = [note for note in notes[one] if note["what"] == "round"]
        dropped.append(
            next(
                (n["t"] - at for n in rounds if n["t"] > at and n["workers"] < len(everybody)), back
            )
        )
        before = [note for note in rounds if note["t"] <= at][-1]
        later = rounds[-1]
        lost.append(later["round"] - before["round"] - (later["used"] - before["used"]))
    hashes: dict[int, set[str]] = {}
    for each in notes.values():
        for note in each:
            if note["what"] == "round" and note["round"] > joined["round"]:
                hashes.setdefault(note["round"], set()).add(note["hash"])
    return {
        "worker": number,
        "pause": max(pauses),
        "dropped": max(dropped),
        "back": back,
        "lost": max(lost),
        "equal": bool(hashes) and all(len(found) == 1 for found in hashes.values()),
        **({} if starts == 1 else {"equal": False, "error": f"{starts} workers were started"}),
    }


def tried(name: str, workers: int, kills: int, seed: int, out: Path) -> list[dict[str, Any]]:
    """A training with some kills; a row for each, the last of which knows of the end, too."""
    draw = random.Random(f"{seed} {name}")  # noqa: S311 - repeatable, not secret
    rows: list[dict[str, Any]] = []
    with started(name, workers, out) as fleet:
        fleet.wait(fleet.together, "the first round of all")
        begin = time.time()
        for at in range(1, kills + 1):
            time.sleep(draw.uniform(0.2, 4.0))
            victim = draw.randrange(workers)
            now = kill(fleet, victim)
            row = {"algorithm": name, "kill": at, "at": now - begin}
            try:
                fleet.wait(lambda now=now: _back(fleet, now), f"kill {at} of {name}")
                time.sleep(1.0)
                rows.append(row | told(fleet, victim, now))
            except TimeoutError as error:
                rows.append(row | {"worker": victim, "error": str(error), "equal": False})
                break
            print(rows[-1], file=sys.stderr, flush=True)
        last = max(note["round"] for one in range(workers) for note in fleet.notes(one)[-1:])
        (out / _STAY).write_text(str(last + 40))
        codes = [one.wait(PATIENCE) for one in fleet.processes]
        ends = {fleet.notes(one)[-1].get("hash") for one in range(workers)}
        rows[-1]["ended"] = codes == [0] * workers and len(ends) == 1
    return rows


def _back(fleet: Fleet, since: float) -> bool:
    """Whether all have ended a round together after a worker came back."""
    joined = [
        note["t"]
        for number in range(len(fleet.processes))
        for note in fleet.notes(number)[-500:]
        if note["what"] == "joined" and note["t"] > since
    ]
    return bool(joined) and fleet.together(max(joined))


# --- what it says --------------------------------------------------------------------------------


def report(rows: Sequence[dict[str, Any]], workers: int) -> str:
    """The table in Markdown."""
    cells = [
        {
            "algorithm": row["algorithm"],
            "kill": str(row["kill"]),
            "at, s": f"{row['at']:.1f}",
            "worker": str(row["worker"]),
            "longest pause of a survivor, s": f"{row['pause']:.1f}" if "pause" in row else "-",
            "dropped by all after, s": f"{row['dropped']:.1f}" if "pause" in row else "-",
            "back after, s": f"{row['back']:.1f}" if "pause" in row else "-",
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
