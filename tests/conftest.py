"""Golden files, and how many examples Hypothesis tries."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest
from commands import Command, in_process
from hypothesis import settings
from places import GOLDEN

from co2sim.cli import main

# One thread for each process: on cores that are shared, threads that wait for each other take up to
# 60 times as long for the small models of these tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# `make test` tries the same few examples every time, `make nightly` new ones. In CI these are the
# same for the same code, so that a change is not stopped by what it did not cause.
settings.register_profile("fast", max_examples=40, deadline=None, derandomize=True, database=None)
settings.register_profile(
    "nightly",
    max_examples=1000,
    deadline=None,
    derandomize="CI" in os.environ,
    database=None,
    print_blob=True,
)
settings.load_profile("fast")

# In the background of a shell control-C is ignored, and so it would be by all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag that writes golden files, and the one that chooses a part of the suite."""
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden from what the code gives"
    )
    parser.addoption(
        "--part", metavar="K/N", help="only the K-th of N parts of the tests, 0 <= K < N"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose a part; modules with long tests go first, so that no worker ends alone with one."""
    if part := config.getoption("--part"):
        index, parts = map(int, part.split("/"))
        chosen = [item for item in items if crc32(item.nodeid.encode()) % parts == index % parts]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
    long = {
        item.path
        for item in items
        if any(item.get_closest_marker(name) for name in ("slow", "dist", "lab", "nightly"))
    }
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with the golden file of a name."""
    update = bool(request.config.getoption("--update-golden"))

    def check(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        if update:
            path.write_text(text)
        assert path.exists(), f"{path} is missing; run pytest --update-golden"
        assert text == path.read_text(), f"{name} changed; if meant, run pytest --update-golden"

    return check


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    """Run `co2sim` in an empty folder; gives exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    return in_process("co2sim", main, monkeypatch, capsys)


@pytest.fixture
def realrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    """Run `realrun` in an empty folder; gives exit code, output and errors."""
    from realrun.cli import main as realrun_main  # noqa: PLC0415 - as below

    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return in_process("realrun", realrun_main, monkeypatch, capsys)


@pytest.fixture
def co2analysis(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `co2analysis`; gives exit code, output and errors."""
    from analysis.cli import main as analysis_main  # noqa: PLC0415 - most tests need none of it

    return in_process("co2analysis", analysis_main, monkeypatch, capsys)


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output is as wide as to a file, whatever a kernel of a notebook set in this process."""
    for name in ("COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
