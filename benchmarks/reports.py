"""What the benchmarks share: folders, tables in Markdown, what made them, and finished runs."""

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"


def parser(doc: str | None, quick: str) -> argparse.ArgumentParser:
    """A command line with --quick and --out; `quick` says what the short run does."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("--quick", action="store_true", help=f"{quick}; keeps nothing without --out")
    made.add_argument("--out", type=Path, help=f"folder of the results (default: {RESULTS})")
    return made


@contextmanager
def folder(given: argparse.Namespace) -> Iterator[Path]:
    """Where this run writes: --out, else the results, else for --quick what is gone afterwards."""
    if given.quick and given.out is None:
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)
        return
    out: Path = given.out or RESULTS
    out.mkdir(parents=True, exist_ok=True)
    yield out


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """A table in Markdown; all cells are texts already."""
    return str(pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True))


def made_by() -> str:
    """The command and the commit that made a table: the last line of each."""
    command = shlex.join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    return f"Made by `python {command}` at commit {commit()}."


def commit() -> str:
    """The short name of the commit, and whether files differ from it."""
    git = shutil.which("git")
    if git is None:
        return "unknown (there is no git)"

    def ask(*arguments: str) -> str | None:
        done = subprocess.run(
            [git, *arguments], cwd=FOLDER, capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else None

    name = ask("rev-parse", "--short", "HEAD")
    if name is None:
        return "unknown (not a git checkout)"
    changed = ask("status", "--porcelain", "--untracked-files=no", "--", "..", ":!results")
    return f"{name} with uncommitted changes" if changed else name


def machine() -> str:
    """What this runs on."""
    info = Path("/proc/cpuinfo")
    names = info.read_text().split("model name\t: ")[1:2] if info.exists() else []
    cpu = names[0].splitlines()[0] if names else platform.processor() or platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"Machine: {cpu}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}"
        f" {platform.release()}, Python {platform.python_version()}, torch {installed('torch')},"
        f" co2sim {installed('co2sim-training')}."
    )


def installed(package: str) -> str:
    """The version of a package, or that there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


Known = dict[tuple[str, ...], dict[str, Any]]
"""Rows of finished runs by their key."""

_KEYS = ("budget", "configuration", "choice", "lr", "seed")
_NUMBERS = ("validation_loss", "accuracy", "penalty", "clipped", "bytes_sent", "wall")
_COLUMNS = (*_KEYS, "strategy", "outer", *_NUMBERS, "curve", "facts", "error")


def read(path: Path, keys: Sequence[str] = _KEYS, numbers: Sequence[str] = _NUMBERS) -> Known:
    """Finished runs; none where there is no file."""
    if not path.exists():
        return {}
    frame = pd.read_csv(path, dtype=dict.fromkeys(keys, str), keep_default_na=False)
    for name in numbers:
        frame[name] = pd.to_numeric(frame[name], errors="coerce")
    return {tuple(row[name] for name in keys): dict(row) for row in frame.to_dict("records")}


def append(path: Path, row: Mapping[str, Any], columns: Sequence[str] = _COLUMNS) -> None:
    """Add a finished run."""
    frame = pd.DataFrame([[row.get(name, "") for name in columns]], columns=list(columns))
    frame.to_csv(path, mode="a", header=not path.exists(), index=False)
