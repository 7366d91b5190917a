"""Commands whose files and output must be the same bytes wherever they run, and the places."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGES = {"co2sim": "co2sim", "realrun": "realrun", "co2analysis": "analysis"}

_CASE = "-m gpt2-small -c examples/my-cluster.toml"
_TWO = "-s zero3 -s co2.published:tau=4,worker=node"
_OFFERS = "-m gpt2-small -c examples/offer-a.toml -c examples/offer-b.toml --tokens 1e10"
_PROBLEM = "--smoothness 1 --noise 1 --gap 1"

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "co2sim list": ("", "clusters", "gpus", "a100-roce800"),
    "co2sim show": (f"{_CASE} -s zeropp",),
    "co2sim run": (
        f"{_CASE} {_TWO} -g 8 {{fold}} --tokens 1e11 --json",
        f"{_CASE} {_TWO} -g 8 --report out/run.html",
        f"{_CASE} {_TWO} -g 8 {{fold}} --jitter 0.1 --straggle 0.1 --interval full",
    ),
    "co2sim trace": (f"{_CASE} -s zero3 -o t.json", f"{_CASE} -s zero3 --jitter 0.1 -o t.jsonl"),
    "co2sim scale": (
        f"{_CASE} -c dgx-h100 {_TWO} -g 8,16 --tokens 1e11 --jobs {{jobs}} --json --report r.html",
        "-m transnormer-7b -c a100-roce800 -s zeropp -g 16 --published papers/co2/results.toml",
    ),
    "co2sim sweep": (
        f"{_CASE} -s zero3 --vary gpus=4,8 --jobs {{jobs}} --csv s.csv --json",
        f"{_CASE} -s ddp --vary gpus=4,8 --jobs {{jobs}} --report r.html",
        f"{_CASE} -s ddp --vary gpus=4,8,16 --jobs {{jobs}} --sort=-tokens_per_s",
    ),
    "co2sim solve": (
        f"inter.bandwidth {_CASE} {_TWO} -g 8 --for efficiency=90% --json --report r.html",
    ),
    "co2sim plan": (f"{_OFFERS} -s ddp -s zero2 -g 8,16 --jobs {{jobs}} --json --report r.html",),
    "co2sim goodput": (f"{_CASE} {_TWO} --set failures=meta-rsc-1 --json",),
    "co2sim report": (f"{_CASE} {_TWO} -g 8,16 --jobs {{jobs}} --tokens 1e11 -o r.html",),
    "co2sim export": (f"{_CASE} -s co2.published:tau=2,worker=node -g 8 --out made",),
    "co2sim replay": ("traces -c a100-roce800 --json",),
    "co2sim explore": (f"{_CASE} -s ddp -g 8 --tolerance 0.3 --jobs {{jobs}} -o e.html",),
    "realrun lab cluster": ("", "--sites 2 --wan '50 Mbit/s'"),
    "co2analysis compare": ("runs --json --csv ops.csv --figure f.svg --report r.html", "runs"),
    "co2analysis validate": ("--papers few --brief --json --markdown v.md",),
    "co2analysis figures": ("--only zeropp-announcement-figure-6 --out figures --json",),
    "co2analysis calibrate": ("--group a100-co2",),
    "co2analysis goodput": ("--json", ""),
    "co2analysis bound": (
        f"{_PROBLEM} --workers 4 --rounds 100 --local-steps 4 --allowed-delay 0.2 --json",
    ),
    "co2analysis tau": (f"-c examples/my-cluster.toml {_PROBLEM} --taus 1,4,16 --json",),
    "co2analysis trends": ("--steps 16 --taus 1,2 --seeds 1 --workers 2 --json",),
}
"""Arguments of every command that only computes."""


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
