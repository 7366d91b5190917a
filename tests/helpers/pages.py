"""The README and the pages of docs/: their blocks, links and headings."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from places import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

_FENCE = re.compile(
    r'^```(?P<kind>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL
)
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


class Block(NamedTuple):
    """A fenced block: its language, its title (a path) if it has one, and what it holds."""

    kind: str
    title: str | None
    text: str

    @property
    def commands(self) -> list[str]:
        """What stands behind `$ `."""
        lines = self.text.splitlines()
        return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    return [Block(m["kind"], m["title"], m["text"]) for m in _FENCE.finditer(page.read_text())]


def commands(page: Path) -> list[str]:
    """The commands of a page that are meant to be run as they stand."""
    return [line for block in blocks(page) if block.kind == "console" for line in block.commands]


def without_code(page: Path) -> str:
    """The text of a page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def links(page: Path) -> Iterator[tuple[Path, str | None]]:
    """Every relative link of a page: the file, and the heading in it if one is named."""
    for target, anchor in _LINK.findall(without_code(page)):
        yield (page.parent / target).resolve() if target else page, anchor or None


def anchors(page: Path) -> set[str]:
    """The names under which a code host lets one link to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def applied(diff: str, text: str) -> str:
    """The text after a diff of one hunk; what it takes away must be there, once."""
    lines = diff.splitlines()
    old, new = ("\n".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
    assert text.count(old) == 1, old
    return text.replace(old, new)


TOY = ROOT / "docs" / "add-a-strategy.md"
"""The page that is executed as a whole, in a copy of the project."""

COMMANDS = dict.fromkeys(
    line for page in PAGES if page != TOY for line in commands(page)
)  # in order, each once
QUICK = [
    line
    for line in COMMANDS
    if re.match(r"co2sim |co2analysis (bound|tau|goodput|whole|fabric|verify)\b", line)
]
IN_A_LAB = [line for line in COMMANDS if line.startswith("co2analysis lab ")]
TRAINING = [line for line in COMMANDS if line.startswith("realrun lab run ")]
ESTIMATES = [line for line in COMMANDS if re.match("realrun train .* --estimate", line)]
ON_CORES = [
    line for line in COMMANDS if re.match(r"realrun (probe|run) |co2analysis compare ", line)
]
WITHOUT_OUTPUT = {
    page: [
        line
        for block in blocks(page)
        if block.kind == "sh"
        for line in block.text.splitlines()
        if re.match(r"co2sim |co2analysis (runs|figures|validate)\b", line)
        and not re.search(r"--scheduler|my-cluster|replay", line)
    ]
    for page in PAGES
}
"""Of pages that do not show what they print: commands that need neither measurements nor hours."""
STUDIES = [line for line in COMMANDS if line.startswith("python ")]


def shell(script: str, folder: Path, root: Path = ROOT) -> str:
    """What a script prints, with the commands of `root` on the path; it must succeed."""
    shims = folder / "bin"
    shims.mkdir(exist_ok=True)
    for name, module in (("co2sim", "co2sim"), ("co2analysis", "analysis"), ("realrun", "realrun")):
        shim = shims / name
        shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        shim.chmod(0o755)
    found = f"{shims}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["/bin/bash", "-euc", script],
        cwd=folder,
        env={**os.environ, "PATH": found, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
