"""What the benchmarks share: folders, tables in Markdown, what made them, and figures."""

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from co2sim.common.plots import GRID, PLAIN_TEXT, STYLE, render

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"


def parser(doc: str | None, quick: str) -> argparse.ArgumentParser:
    """A command line with --quick and --out; `quick` says what the short run does."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("--quick", action="store_true", help=f"{quick}; keeps nothing without --out")
    made.add_argument("--out", type=Path, help=f"folder of the results (default: {RESULTS})")
    return made


@contextmanager
def folder(options: argparse.Namespace) -> Iterator[Path]:
    """Where this run writes: --out, else the results, else for --quick what is gone afterwards."""
    if options.quick and options.out is None:
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)
        return
    out: Path = options.out or RESULTS
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


def needed(path: Path) -> str:
    """The text of a file that results are made from; ends the command where there is none."""
    if not path.exists():
        sys.exit(f"{path} is not there: run this without --report")
    return path.read_text("utf-8")


def publish(
    options: argparse.Namespace, name: str, text: str, picture: bytes | None = None
) -> None:
    """Write a page as NAME.md, its figure as NAME.png, and print the page."""
    with folder(options) as out:
        (out / f"{name}.md").write_text(text, "utf-8")
        if picture:
            (out / f"{name}.png").write_bytes(picture)
    print(text)


def png(
    size: tuple[float, float],
    draw: Callable[[Figure], None],
    style: Mapping[str, Any] = STYLE | GRID | PLAIN_TEXT,
) -> bytes:
    """A figure of a width and a height in inches."""
    with mpl.rc_context(dict(style)):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        return render(figure, "png")


def legend_below(figure: Figure, axes: Axes, columns: int) -> None:
    """The legend of some axes, below all of them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
