"""One trial: a command, what befalls it, and whether all that has to hold does."""

import json
import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
import urllib.request
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import chaos_start
import psutil
from chaos_faults import Fault, before, happen, missing, repaired
from chaos_judge import drafts, in_time, judge, left_behind, saved
from chaos_plan import DAMAGE, Trial
from chaos_targets import (
    LONGEST,
    STOP,
    command,
    differences,
    ended,
    kill_all,
    reference,
    started,
)

_ENDED = {-signal.SIGKILL, -signal.SIGTERM}
"""Codes of a command that the system ended: it could not tidy up, but all it started must go."""
_REFUSED = 2
"""Exit code for what cannot be used."""
_SERVED = 12.0
"""Seconds of a server's life in which something befalls it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of a trial: what happened, what is wrong ("": nothing), why it was not made ("": it was)."""

    number: int
    target: str
    strategy: str
    fault: str
    plain: bool
    happened: str
    problem: str
    skipped: str
    code: int | None
    seconds: float
    after: float


def run(trial: Trial, base: Path, import_s: float) -> None:
    """In a process of its own: make a trial, and write the verdict into the folder of trials."""
    folder = base / "trials" / str(trial.number)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        chaos_start.alone()
        verdict = _tried(trial, folder, base, import_s, began)
        if verdict.problem:
            kept = base / "failures" / str(trial.number)
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(folder, kept, symlinks=True, ignore_dangling_symlinks=True)
            (kept / "verdict.json").write_text(
                json.dumps(asdict(verdict) | {"trial": asdict(trial)})
            )
        (base / "trials" / f"{trial.number}.json").write_text(json.dumps(asdict(verdict)))
    except Exception:  # noqa: BLE001 - in a process that is about to end
        traceback.print_exc()
    finally:
        kill_all()


def _tried(trial: Trial, folder: Path, base: Path, import_s: float, began: float) -> Verdict:
    fault, problem, one = Fault(), "", None
    skipped = missing(trial)
    if not skipped and trial.fault in DAMAGE:
        fault.said, problem = _damaged(trial, folder, base)
    elif not skipped:
        one, fault, problem = _befallen(trial, folder, base, import_s)
    return Verdict(
        trial.number,
        trial.target,
        trial.strategy,
        trial.fault,
        trial.plain,
        fault.said,
        problem,
        skipped,
        one.code if one else None,
        round(time.monotonic() - began, 2),
        round(trial.when, 3),
    )


def _befallen(
    trial: Trial, folder: Path, base: Path, import_s: float
) -> tuple[chaos_start.Command, Fault, str]:
    """A command, a fault, and all that has to hold afterwards."""
    server = trial.target == "explore"
    seconds = _SERVED if server else reference(trial, base).seconds
    if trial.plain and not server:
        seconds += 2 * import_s
    environment = before(trial, folder)
    one = started(trial, folder, command(trial, folder), environment)
    fault = happen(trial, one, folder, seconds)
    problem = _answers(trial, one) if server else ""
    if not in_time(trial, one, fault, seconds):
        waited = time.monotonic() - fault.at
        problem = problem or f"has not ended {waited:.0f} s after the fault"
        seen = psutil.Process().children(recursive=True)
        (folder / "processes").write_text("\n".join(map(str, seen)))
        kill_all()
        return one, fault, problem
    killed = trial.fault in {"launcher killed", "kill", "stop", "launcher stopped"}
    killed |= one.code == -signal.SIGTERM
    problem = problem or judge(trial, one, fault)
    problem = problem or left_behind(folder, temporary=one.code not in _ENDED)
    repaired(trial, folder)
    problem = problem or saved(trial, folder / "out")
    # Who is killed removes no draft, nor anybody in a read-only folder: the next training does.
    excused = killed or trial.fault == "read-only folder"
    problem = problem or ("" if excused else drafts(folder / "out"))
    if trial.trains:
        problem = problem or _goes_on(trial, folder, base)
    return one, fault, problem


def _goes_on(trial: Trial, folder: Path, base: Path, *more: str) -> str:
    """Go on with --resume; the end must be that of an undisturbed training, bit for bit."""
    there = (folder / "out" / "log.csv").exists()
    again = folder / "resumed"
    again.mkdir()
    shutil.copytree(folder / "out", again / "out")  # it may be a disk of its own
    local = Trial(**{n: getattr(trial, n) for n in trial.__slots__} | {"plain": False})
    one = started(local, again, command(local, again, *(["--resume"] if there else []), *more))
    if not ended(one, LONGEST) or one.code:
        kill_all()
        return f"it does not go on: {one.code}, {_last(one.said)}"
    found = differences(again / "out", reference(trial, base).folder / "out")
    return f"after going on, {found}" if found else drafts(again / "out") or left_behind(again)


def _damaged(trial: Trial, folder: Path, base: Path) -> tuple[str, str]:
    """Damage a file of a checkpoint: it is refused, named, and the one before goes on."""
    whole = reference(trial, base, stopped=True)
    shutil.copytree(whole.folder / "out", folder / "out")
    rng = random.Random(trial.seed)  # noqa: S311 - repeatable, not secret
    last = folder / "out" / "checkpoints" / f"step-{STOP:06d}"
    file = rng.choice(sorted(last.iterdir()))
    said = f"{trial.fault} {file.name}"
    data = bytearray(file.read_bytes())
    if trial.fault == "deleted":
        file.unlink()
    elif trial.fault == "truncated":
        file.write_bytes(data[: rng.randrange(len(data))])
    else:
        place = rng.randrange(len(data))
        data[place] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
    one = started(trial, folder, command(trial, folder, "--resume"))
    if not ended(one, LONGEST):
        kill_all()
        return said, "it did not end"
    lines = one.said.splitlines()
    if one.code != _REFUSED or len(lines) != 1 or file.name not in lines[0]:
        return said, f"it was not refused with one line: {one.code}, {_last(one.said)}"
    offered = re.search(r"--from-step (\d+)", lines[0])
    if not offered:
        return said, "no other checkpoint was offered"
    problem = left_behind(folder) or drafts(folder / "out")
    return said, problem or _goes_on(trial, folder, base, "--from-step", offered[1])


def _answers(trial: Trial, one: chaos_start.Command) -> str:
    """Whether a server still answers; then it is told to end."""
    if trial.fault in {"launcher killed", "SIGTERM", "SIGINT"}:
        return ""
    limit = time.monotonic() + 60
    problem = "it does not serve"
    while time.monotonic() < limit and one.poll() is None:
        address = re.search(r"open (\S+)", one.printed)
        if address:
            problem = _asked(address[1])
            if not problem:
                break
        time.sleep(0.2)
    with suppress(ProcessLookupError):
        os.kill(one.pid, signal.SIGINT)
    return problem


def _asked(address: str) -> str:
    """Ask the server for figures, as its page does."""
    token = address.partition("token=")[2]
    origin = address.partition("/?")[0]
    view = {"cluster": "cloud-100g", "model": "gpt2-small", "strategies": ["ddp"], "gpus": 16}
    try:
        with urllib.request.urlopen(address, timeout=30) as page:  # noqa: S310 - on this machine
            page.read()
        asked = urllib.request.Request(  # noqa: S310 - on this machine
            f"{origin}/figures",
            json.dumps({"view": view, "settings": [{}]}).encode(),
            {_header(): token, "Content-Type": "application/json", "Origin": origin},
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:  # noqa: S310 - on this machine
            return "" if json.loads(answer.read()) else "the answer is empty"
    except (OSError, ValueError) as error:
        return f"it does not answer: {error}"


def _header() -> str:
    """The name of the header with the server's token."""
    from co2sim.explore.guard import HEADER  # noqa: PLC0415 - starlette

    return HEADER


def _last(text: str) -> str:
    return " / ".join(text.splitlines()[-3:])[:400]


def tidied(trial: Trial, base: Path) -> None:
    """Remove the folder of a trial that is over."""
    shutil.rmtree(base / "trials" / str(trial.number), ignore_errors=True)
    (base / "trials" / f"{trial.number}.json").unlink(missing_ok=True)
