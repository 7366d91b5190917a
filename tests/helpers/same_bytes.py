"""Commands whose files and output must be the same bytes wherever they run, and the places."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

from places import DATA

PACKAGES = {"co2sim": "co2sim", "realrun": "realrun", "co2analysis": "analysis"}

_WORDS = {
    "CASE": "-m gpt2-small -c examples/my-cluster.toml",
    "TWO": "-s zero3 -s co2.published:tau=4,worker=node",
    "OFFERS": "-m gpt2-small -c examples/offer-a.toml -c examples/offer-b.toml --tokens 1e10",
    "PROBLEM": "--smoothness 1 --noise 1 --gap 1",
}
COMMANDS: dict[str, tuple[str, ...]] = {}
"""Arguments of every command that only computes."""
for _line in (DATA / "same-bytes.txt").read_text().splitlines()[1:]:
    _name, _, _arguments = _line.partition(" =>")
    _whole = Template(_arguments.strip()).substitute(_WORDS)
    COMMANDS[_name] = (*COMMANDS.get(_name, ()), _whole)


@dataclass(frozen=True)
class Place:
    """Where a command runs: its folder, its environment, and the options that change no result."""

    folder: Path
    environment: Mapping[str, str]
    options: Mapping[str, str]
    cache: str
    columns: str = ""

    @property
    def work(self) -> Path:
        """The folder that commands run in."""
        return self.folder / "work"

    def run(self, command: str, arguments: str) -> dict[str, bytes]:
        """What a command printed and wrote, by name, beside what was there."""
        name, *words = command.split()
        words += shlex.split(arguments.format(**self.options))
        env = {
            **os.environ,
            **self.environment,
            "HOME": str(self.folder),
            "XDG_CACHE_HOME": self.cache,
        }
        if self.columns and "--json" in words:  # tables are as wide as COLUMNS says
            env["COLUMNS"] = self.columns
        command_line = [sys.executable, "-m", PACKAGES[name], *words]
        done = subprocess.run(
            command_line, cwd=self.work, env=env, capture_output=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        files = sorted(path for path in self.work.rglob("*") if path.is_file())
        return {
            "stdout": done.stdout,
            **{str(path.relative_to(self.work)): path.read_bytes() for path in files},
        }
