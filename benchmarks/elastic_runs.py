"""Trainings in the lab that are watched, and killed in part, from outside."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from realrun.launch.membership import LIFE
from realrun.train.elastic_record import GenerationRow, read_generations
from realrun.train.log import LogRow, read

NODES, RATE, DEADLINE = 4, "100 Mbit/s", 10.0
TAU = 8
LONGEST = 300.0
"""Seconds to wait for anything before the run counts as failed."""

OUTER = {"diloco": "momentum=0.5,lr=0.7"}
"""Milder than DiLoCo's default, which is for rounds of 500 steps."""


class Training:
    """A training in the lab, seen from outside."""

    def __init__(self, out: Path, strategy: str, steps: int) -> None:
        self.out = out
        train = [
            *("realrun", "train", "--elastic", "--strategy", strategy, "--steps", str(steps)),
            *("--size", "tiny", "--context", "32", "--batch", "32", "--lr", "0.003"),
            *("--log-every", "1", "--eval-every", str(5 * TAU), "--out", str(out)),
            *("--outer", OUTER.get(strategy.partition(":")[0], "")),
            *("--deadline", f"{DEADLINE} s"),
        ]
        lab = ["lab", "run", "--nodes", str(NODES), "--rate", RATE, "--restarts", "100", "--"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "realrun", *lab, *train],
            env={**os.environ, "TAG": str(out)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def members(self) -> Mapping[str, psutil.Process]:
        """The processes of ranks that train, by name: "2.1"."""
        found = {}
        for process in psutil.process_iter():
            try:
                values, name = process.environ(), process.name()
            except (psutil.Error, OSError):
                continue
            if values.get("TAG") != str(self.out):
                continue
            if name.startswith("rank"):  # forked: its environment was another when it began
                found[name.removeprefix("rank")] = process
            elif LIFE in values:
                found[f"{values['RANK']}.{values[LIFE]}"] = process
        return found

    def generations(self) -> tuple[GenerationRow, ...]:
        """The record so far."""
        return read_generations(self.out)

    def wait_for_all(self, more_than: int) -> GenerationRow:
        """Wait until all ranks are members, in a generation after that number."""
        limit = time.monotonic() + LONGEST
        while time.monotonic() < limit and self.process.poll() is None:
            rows = self.generations()
            if rows and rows[-1].generation > more_than and len(members(rows[-1])) == NODES:
                return rows[-1]
            time.sleep(0.05)
        raise RuntimeError(f"not all ranks came: {self.said()}")

    def round(self) -> int:
        """The round under way."""
        rows = log(self.out)
        return rows[-1].step // TAU if rows else 0

    def stop(self) -> None:
        """Ask all to end in good order, by asking one of those who train."""
        last = members(self.generations()[-1])
        self.members()[last[-1]].send_signal(signal.SIGTERM)
        self.process.wait(LONGEST)

    def said(self) -> str:
        """What it printed; ends it."""
        self.process.kill()
        return self.process.communicate()[0]


def members(row: GenerationRow) -> list[str]:
    """The names of a generation's members, the first first."""
    return row.members.split()


def log(out: Path) -> tuple[LogRow, ...]:
    """The log so far; none before its first row."""
    return read(out) if (out / "log.csv").exists() else ()


@contextmanager
def training(out: Path, strategy: str, steps: int) -> Iterator[Training]:
    """A training that is over afterwards, one way or another."""
    made = Training(out, strategy, steps)
    try:
        yield made
        code = made.process.wait(LONGEST)
        assert code == 0, made.said()
    finally:
        made.process.kill()
        made.process.communicate()
