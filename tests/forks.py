"""Commands of ours, forked from a process that has loaded what they need.

As a program each needs one to two seconds of a core to load it.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

LOADED = (
    "analysis.cli.app",
    "analysis.published.figures.paper_figures",
    "co2sim.cli.app",
    "co2sim.explore.page",
    "co2sim.report.study_page",
    "matplotlib.figure",
    "realrun.cli.app",
)
"""What most commands load sooner or later."""

SERVE = """
import faulthandler, json, os, runpy, sys
from importlib import import_module

for module in json.loads(sys.argv[1]):
    import_module(module)
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if not child:
        faulthandler.dump_traceback_later(300, exit=True)
        for number, path in enumerate((os.devnull, asked["out"], asked["err"])):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        os.chdir(asked["folder"])
        os.environ.update(asked["environment"])
        sys.argv = asked["command"]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Forks:
    """A process whose forks are `python -m MODULE ...`, one after another."""

    def __init__(self, process: subprocess.Popen[str], scratch: Path) -> None:
        self._process, self._out, self._err = process, scratch / "out", scratch / "err"

    def run(self, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> bytes:
        """What a command printed; it has ended well."""
        asked = {
            "command": list(command),
            "folder": str(folder),
            "environment": dict(environment),
            "out": str(self._out),
            "err": str(self._err),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        assert self._process.stdout.readline() == "0\n", self._err.read_text()
        return self._out.read_bytes()


@contextmanager
def forks(environment: Mapping[str, str], scratch: Path) -> Iterator[Forks]:
    """Such a process, started with this environment; what is printed goes to files of `scratch`."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, json.dumps(LOADED)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Forks(process, scratch)
