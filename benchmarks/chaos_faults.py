"""What befalls a command: how each fault is made, and when."""

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from chaos_plan import STUDIES, Trial
from chaos_start import CLOCK, RAISES, Command
from chaos_targets import STEPS, deadline

_SIGNALS = {"launcher killed": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
_DISK = 64
"""MiB of the small disk, before most of it is filled."""
_FREE = 1_500_000
"""Bytes that are left free at most."""
_SHORTEST, _SPREAD = 0.2, 1.5
"""Seconds that something is away which comes back: well below the deadline."""


@dataclass(slots=True)
class Fault:
    """What has happened: in words, when (monotonic seconds), and to which process."""

    said: str = ""
    at: float = field(default_factory=time.monotonic)
    stalled: float = 0.0
    alive: tuple[int, ...] = ()


def stalled() -> float:
    """Seconds, since the machine started, in which some process waited for a core."""
    path = Path("/proc/pressure/cpu")
    with suppress(OSError, IndexError, ValueError):
        return int(path.read_text("ascii").split("total=")[1].split()[0]) / 1e6
    return 0.0


def missing(trial: Trial) -> str:
    """Why a trial cannot be made here; "" if it can."""
    root = os.geteuid() == 0
    if trial.in_lab and not root:
        return "a lab needs root"
    if trial.fault in {"full disk", "read-only folder"} and not root:
        return "a small disk needs root"
    return ""


def before(trial: Trial, folder: Path) -> dict[str, str]:
    """Prepare a fault; variables of the environment of the command."""
    out = folder / "out"
    if trial.fault in {"full disk", "read-only folder"}:
        out.mkdir(parents=True, exist_ok=True)
        _tool("mount", "-t", "tmpfs", "-o", f"size={_DISK}m", "chaos", str(out))
    if trial.fault == "raise":
        most = STEPS if trial.trains else 3
        asked = {"rank": trial.victim, "at": round(trial.when * most), "error": trial.error}
        return {RAISES: json.dumps(asked)}
    if trial.fault == "clock jump":
        moved = folder / "clock"
        moved.write_text("0")
        return {CLOCK: str(moved)}
    return {}


def happen(trial: Trial, one: Command, folder: Path, seconds: float) -> Fault:
    """Wait until it is time, and do it. `said` is empty where the command had ended before."""
    until = time.monotonic() + trial.when * seconds
    while time.monotonic() < until and one.poll() is None:
        time.sleep(0.01)
    found = Fault()
    if trial.fault == "raise":
        while one.poll() is None and time.monotonic() < until + 4 * seconds + 30:
            time.sleep(0.02)
        found.said = "asked to raise"
    elif one.poll() is None:
        found.said = _done(trial, one, folder)
    found.at, found.stalled = time.monotonic(), stalled()
    return found


def _done(trial: Trial, one: Command, folder: Path) -> str:
    """Do what the trial asks; in words, "" if there was nothing to hit."""
    said, out = "", folder / "out"
    match trial.fault:
        case "launcher killed" | "SIGTERM" | "SIGINT":
            said = _send(psutil.Process(one.pid), _SIGNALS[trial.fault])
        case "launcher stopped":
            said = _stopped(psutil.Process(one.pid), _too_long(trial), one)
        case "launcher paused":
            said = _stopped(psutil.Process(one.pid), _away(trial), one)
        case "kill" | "stop" | "pause" | "slow":
            victim = _victim(trial, one)
            said = _hit(trial, victim, one) if victim else ""
        case "full disk":
            said = _filled(out, int(trial.amount * _FREE))
        case "read-only folder":
            said = _read_only(out)
        case "clock jump":
            jump = (1 if trial.victim % 2 else -1) * 10 ** (1 + 5 * trial.amount)
            (folder / "clock").write_text(f"{jump:.0f}")
            said = f"{jump:+.0f} s"
        case _:
            said = _network(trial, one)
    return said


def _away(trial: Trial) -> float:
    return _SHORTEST + _SPREAD * trial.amount


def _too_long(trial: Trial) -> float:
    """Seconds after which a launcher that is stopped has lost its ranks: in a lab 30, and some."""
    return 40 if trial.in_lab else 2 * deadline(trial) + 12


def _send(process: psutil.Process, number: signal.Signals) -> str:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return ""
    return f"{number.name} to {process.pid}"


def _hit(trial: Trial, victim: psutil.Process, one: Command) -> str:
    match trial.fault:
        case "kill":
            return _send(victim, signal.SIGKILL)
        case "stop":
            return _send(victim, signal.SIGSTOP)
        case "pause":
            return _stopped(victim, _away(trial), one)
        case _:
            for _ in range(10 + round(20 * trial.amount)):
                if not _stopped(victim, 0.05, one):
                    break
                time.sleep(0.05)
            return "slowed"


def _stopped(process: psutil.Process, seconds: float, one: Command) -> str:
    """Stop it for so long."""
    said = _send(process, signal.SIGSTOP)
    until = time.monotonic() + seconds
    while said and time.monotonic() < until and one.poll() is None:
        time.sleep(0.01)
    _send(process, signal.SIGCONT)
    return f"{said} for {seconds:.1f} s" if said else ""


def _victim(trial: Trial, one: Command) -> psutil.Process | None:
    """The process of the rank, or one of those that a command has started; waits for it."""
    limit = time.monotonic() + 20
    while one.poll() is None and time.monotonic() < limit:
        if trial.target in STUDIES:
            found = workers(one.pid)
            if found:
                return found[trial.victim % len(found)]
        elif rank := ranks(one.pid).get(trial.victim):
            return rank
        time.sleep(0.02)
    return None


def ranks(launcher: int) -> dict[int, psutil.Process]:
    """The processes of ranks that live, by rank."""
    found: dict[int, psutil.Process] = {}
    with suppress(psutil.Error):
        for process in psutil.Process(launcher).children(recursive=True):
            with suppress(psutil.Error, OSError, ValueError):
                name = Path(f"/proc/{process.pid}/comm").read_text("utf-8").strip()
                told = (
                    name[4:].split(".")[0]
                    if name.startswith("rank")
                    else process.environ().get("RANK")
                )
                if told is not None and process.status() != psutil.STATUS_ZOMBIE:
                    found.setdefault(int(told), process)
    return found


def workers(command: int) -> list[psutil.Process]:
    """The processes that simulate for a command: those that are not about semaphores."""
    with suppress(psutil.Error):
        return [
            child
            for child in psutil.Process(command).children(recursive=True)
            if not any("resource_tracker" in word for word in child.cmdline())
        ]
    return []


def _filled(out: Path, free: int) -> str:
    """Fill the disk but for so many bytes."""
    place = os.statvfs(out)
    rest = place.f_bavail * place.f_frsize - free
    with suppress(OSError), (out / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(rest, 1))
    return f"{free:,} bytes are free"


def _read_only(out: Path) -> str:
    """Let nothing more be written into the folder or, while its log is open, its checkpoints."""
    with suppress(subprocess.CalledProcessError):
        _tool("mount", "-o", "remount,bind,ro", str(out))
        return "the folder"
    inner = out / "checkpoints"
    if not inner.exists():
        return ""
    with suppress(subprocess.CalledProcessError):
        _tool("mount", "--bind", str(inner), str(inner))
        _tool("mount", "-o", "remount,bind,ro", str(inner))
        return "its checkpoints"
    return ""


def repaired(trial: Trial, folder: Path) -> None:
    """Undo what the fault did to the disk."""
    if trial.fault == "read-only folder":
        for path in (folder / "out" / "checkpoints", folder / "out"):
            with suppress(subprocess.CalledProcessError):
                _tool("mount", "-o", "remount,bind,rw", str(path))
    (folder / "out" / "filler").unlink(missing_ok=True)


def _network(trial: Trial, one: Command) -> str:
    """Cut the node of a rank off, for good or for a while, or let it send slowly."""
    process = _victim(trial, one)
    if process is None:
        return ""
    enter = ["nsenter", f"--net=/proc/{process.pid}/ns/net", "--"]
    with suppress(subprocess.CalledProcessError, psutil.Error):
        if _net(process.pid) == _net(one.pid):  # its node is not there yet
            return ""
        if trial.fault == "rate drop":
            rate = 5 + round(45 * trial.amount)
            limit = f"rate {rate}mbit burst 8kb limit 64mb"
            _tool(*enter, *f"tc qdisc replace dev eth0 root tbf {limit}".split())
            return f"{rate} Mbit/s"
        link = [*enter, "ip", "link", "set", "eth0"]
        _tool(*link, "down")
        if trial.fault == "network cut":
            return "down"
        time.sleep(_away(trial))
        _tool(*link, "up")
        return f"down for {_away(trial):.1f} s"
    return ""


def _net(pid: int) -> Path:
    """The network namespace of a process."""
    return Path(f"/proc/{pid}/ns/net").readlink()


def _tool(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
