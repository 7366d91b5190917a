"""What has to hold after a fault, and what does not."""

import json
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
from chaos_faults import Fault, stalled
from chaos_plan import STUDIES, Trial
from chaos_start import Command
from chaos_targets import deadline

from co2sim.trace_lines import read_json_lines
from realrun.launch.supervise import SILENT

_TOLD: dict[str, int] = {"SIGTERM": 143, "SIGINT": 130}
_LONGEST_LINE = 480
"""Characters of a line of error: 400, and the rank in front, and a folder of a trial."""
_GRACE = 5.0
"""Seconds that a launcher gives to ranks that were told to stop, and that pass until it kills."""
_ALLOWANCE = 4.0
"""Seconds for what no rank waits for: to see it, to end, to tidy up."""


def limit(trial: Trial, seconds: float) -> float:
    """Seconds from the fault to the end of the command, on a machine with nothing else to do."""
    longest = 3 * seconds + 20
    match trial.fault:
        case "kill" if trial.target not in {"elastic", *STUDIES}:
            return deadline(trial) + _GRACE + _ALLOWANCE
        case "stop" | "network cut" if trial.target != "elastic":
            return max(deadline(trial) + _GRACE, SILENT) + _GRACE + _ALLOWANCE
        case "launcher killed":
            return _ALLOWANCE
        case "launcher stopped":
            return _GRACE + _ALLOWANCE
        case "SIGTERM" | "SIGINT" if trial.target not in {"train", "elastic"}:
            return _GRACE + _ALLOWANCE
        case _:
            return longest + 60 * (trial.target == "elastic") + deadline(trial) + _GRACE


def in_time(trial: Trial, one: Command, fault: Fault, seconds: float) -> bool:
    """Wait for the end; time in which processes waited for a core is not counted."""
    allowed = limit(trial, seconds)
    while one.poll() is None:
        waited = time.monotonic() - fault.at
        if waited > min(allowed + stalled() - fault.stalled, 3 * allowed):
            return False
        time.sleep(0.02)
    return True


def codes(trial: Trial, fault: Fault) -> set[int]:
    """The exit codes that are right."""
    told = _TOLD.get(trial.fault, 0)
    if not fault.said:
        found = {0}
    elif trial.fault == "launcher killed":
        found = {-signal.SIGKILL}
    elif told and trial.target in STUDIES:
        # Before the command has its handlers, the signal itself ends it.
        found = {told, -signal.SIGTERM if trial.fault == "SIGTERM" else -signal.SIGINT}
        found |= {0} if trial.target == "explore" else set()
    elif told:  # before the launcher has its handler, the system ends it
        found = {told, -signal.SIGTERM} if trial.fault == "SIGTERM" else {told}
    elif trial.fault in {"full disk", "read-only folder"}:
        found = {0, 1, 2}
    elif trial.fault in _DEADLY:
        lasting = trial.target == "elastic" or trial.target in STUDIES
        found = ({0} if trial.fault in {"kill", "stop"} else {0, 1}) if lasting else {1}
        found |= {1} if trial.target in {"sweep", "explore --out"} else set()
    else:
        found = {0}
    return found


_DEADLY = ("kill", "stop", "raise", "launcher stopped", "network cut")
_GONE = "gives no sign of life|did not come|is not there|cannot reach|did not stop|gave no sign"
_RAISED = {"RuntimeError": "allocate memory", "MemoryError": "no more memory"}
_CAUSES = {
    "launcher stopped": "launcher",
    "SIGINT": "interrupted|asked to stop",
    "full disk": "(?i)no space left on device",
    "read-only folder": "(?i)read-only file system",
}


def cause(trial: Trial, code: int) -> str:
    """What some line has to say, as a regular expression; "" if nothing."""
    own = f"rank {trial.victim}"
    gone = rf"{own} ({_GONE})"
    elastic = trial.target == "elastic"
    if (code == 0 and not elastic) or trial.target == "explore":
        return ""
    causes = _CAUSES | {
        "kill": "killed" if trial.target in STUDIES else rf"{own} was killed by SIGKILL",
        "stop": rf"{own} (was killed|came more than)" if elastic else gone,
        "network cut": gone,
        "raise": rf"(?m)\b{own}\b.*({_RAISED.get(trial.error, 'a kernel went wrong')})",
    }
    return causes.get(trial.fault, "")


def judge(trial: Trial, one: Command, fault: Fault) -> str:
    """What is wrong with the end of a command that has ended; "" if nothing."""
    assert one.code is not None
    said, allowed = one.said, codes(trial, fault)
    for words in ("Traceback (most recent call last)", "terminate called", "core dumped"):
        if words in said + one.printed:
            return f"{words}: {' / '.join(said.splitlines()[-4:])}"[:600]
    finished = _finished(trial, one)
    if one.code not in allowed and not (one.code == 0 and finished):
        return f"exit code {one.code}, not {' or '.join(map(str, sorted(allowed)))}"
    errors = [line for line in said.splitlines() if "error: " in line]
    for line in errors:
        if len(line) > _LONGEST_LINE:
            return f"a line of error has {len(line)} characters"
    if one.code in {1, 2} and not errors:
        return "no line tells an error"
    wanted = cause(trial, one.code) if fault.said and not finished else ""
    if wanted and not re.search(wanted, said):
        return f"no line says {wanted!r}"
    return ""


def _finished(trial: Trial, one: Command) -> bool:
    """Whether all work was done, though something was hit: at the very end, or without effect."""
    told = re.search(r"^(timeline|figure) ", one.printed, re.MULTILINE)
    untouched = trial.target != "elastic" or "\n0 workers lost" in one.printed
    ending = {*_DEADLY, *_TOLD, "launcher killed"} - {"network cut"}
    return bool(told) and untouched and trial.fault in ending


def left_behind(folder: Path, *, temporary: bool = True, seconds: float = 3.0) -> str:
    """What is still there of a command that has ended; "" if nothing."""
    began, before = time.monotonic(), stalled()
    while True:
        found = _left(folder if temporary else None)
        if not found or time.monotonic() - began > min(seconds + stalled() - before, 3 * seconds):
            return found
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)


def _left(folder: Path | None) -> str:
    found: list[str] = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"process {process.pid}: {' '.join(process.cmdline())[:200]}")
    kept = "torchinductor_"  # a cache of torch, one for each user
    files = list((folder / "tmp").iterdir()) if folder else []
    found += [f"temporary {path.name}" for path in files if not path.name.startswith(kept)]
    if not os.geteuid():
        found += [str(path) for path in Path("/dev/shm").iterdir()]  # noqa: S108 - our own
        for name in ("tcp", "tcp6"):
            lines = Path(f"/proc/self/net/{name}").read_text("ascii").splitlines()[1:]
            found += [f"port {line.split()[1]}" for line in lines if line.split()[3] == "0A"]
        lines = Path("/proc/self/net/dev").read_text("ascii").splitlines()
        links = [line.partition(":") for line in lines]
        found += [f"link {one.strip()}" for one, colon, _ in links if colon and one.strip() != "lo"]
    return f"left behind: {', '.join(sorted(found)[::-1])}"[:900] if found else ""


def drafts(out: Path) -> str:
    """Files that were not finished; "" if there are none."""
    found = sorted(str(path.relative_to(out)) for path in out.rglob(".*"))
    return f"drafts are left: {' '.join(found)[:200]}" if found else ""


def saved(trial: Trial, out: Path) -> str:
    """What is not whole of the files that a run has left; "" if all are."""
    for path in sorted(out.rglob("*")):
        draft = any(part.startswith(".") for part in path.relative_to(out).parts)
        if path.is_dir() or draft or path.name == "filler":
            continue
        try:
            if path.suffix == ".json":
                json.loads(path.read_text("utf-8"))
            elif path.suffix == ".jsonl":
                read_json_lines(path)
            elif path.suffix in {".png", ".html", ".csv"} and path.name != "log.csv":
                data = path.read_bytes()
                assert data
                assert path.suffix != ".html" or data.rstrip().endswith(b"</html>")
                assert path.suffix != ".png" or b"IEND" in data[-12:]
        except Exception as error:  # noqa: BLE001 - whatever it is, the file is not whole
            return f"{path.relative_to(out)} is not whole: {type(error).__name__}: {error}"[:300]
    if trial.target == "elastic" and (out / "train.json").exists():
        facts = json.loads((out / "train.json").read_text())["facts"].get("elastic", {})
        if not facts.get("anchors_equal", True):
            return "anchors differ between members"
    return ""
