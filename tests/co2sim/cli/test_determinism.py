"""The same command gives the same bytes wherever it runs."""

import io
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pytest
from places import ROOT
from same_bytes import COMMANDS, Place
from simulated_record import measured

from co2sim import Question
from co2sim.simulation import chakra
from realrun.record import write

FEW = {
    *(("co2sim list", 0), ("co2sim show", 0), ("co2sim run", 0), ("co2sim run", 2)),
    *(("co2sim trace", 1), ("co2sim sweep", 2), ("co2sim goodput", 0), ("co2analysis bound", 0)),
}
"""Cases of `make test`: none writes a page; the others run at night."""

Inputs = Callable[[Path], None]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Fill a folder with what the commands read."""
    runs = tmp_path_factory.mktemp("measured")
    for strategy in ("ddp", "zero3", "co2.published(tau=2)"):
        write(runs / strategy, measured(strategy))
    case = Question(
        cluster="a100-roce800", model="gpt2-small", strategy="co2.published:tau=2", gpus=16
    ).stage()
    traces = tmp_path_factory.mktemp("exported") / "traces"
    chakra.write(case.schedule, case.cluster, traces, precision="bf16")

    def fill(folder: Path) -> None:
        for name in ("examples", "papers"):
            shutil.copytree(ROOT / name, folder / name)
        shutil.copytree(ROOT / "papers" / "zeropp", folder / "few" / "zeropp")
        shutil.copytree(runs, folder / "runs")
        shutil.copytree(traces, folder / "traces")

    return fill


@pytest.fixture(scope="module")
def comma(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a locale with a decimal comma, or of C.UTF-8 where none can be made."""
    folder = tmp_path_factory.mktemp("locales")
    made = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(folder / "de_DE.UTF-8")]
    if shutil.which("localedef") and subprocess.run(made, check=False).returncode == 0:
        return {"LC_ALL": "de_DE.UTF-8", "LOCPATH": str(folder)}
    return {"LC_ALL": "C.UTF-8"}


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders for what libraries keep, empty at first."""
    return str(tmp_path_factory.mktemp("cache")), str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def places(
    tmp_path: Path, inputs: Inputs, caches: tuple[str, str], comma: dict[str, str]
) -> tuple[Place, Place]:
    """Two places that differ in all that must not matter."""
    here = Place(
        tmp_path / "here",
        {"PYTHONHASHSEED": "1", "LC_ALL": "C", "TZ": "Etc/GMT+12", "PYTHONPATH": str(ROOT)},
        {"jobs": "1", "fold": "--fold"},
        caches[0],
    )
    there = Place(
        tmp_path / "far" / "away",
        {
            **comma,
            "PYTHONHASHSEED": "2",
            "TZ": "Etc/GMT-14",
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT / "tests" / "helpers" / "elsewhere"), str(ROOT)]
            ),
        },
        {"jobs": "2", "fold": "--no-fold"},
        caches[1],
        columns="61",
    )
    for place in (here, there):
        inputs(place.folder / "work")
    return here, there


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        pytest.param(
            command,
            arguments,
            id=f"{command} {arguments}",
            marks=pytest.mark.slow if (command, place) in FEW else pytest.mark.nightly,
        )
        for command, cases in COMMANDS.items()
        for place, arguments in enumerate(cases)
    ],
)
def test_the_bytes_are_the_same(command: str, arguments: str, places: tuple[Place, Place]) -> None:
    """Whatever the hash seed, processes, engine, locale, time zone, width, folder, home, and order.

    Nothing holds the date.
    """
    here, there = (place.run(command, arguments) for place in places)
    assert list(here) == list(there)
    assert [name for name in here if here[name] != there[name]] == []
    dates = {datetime.now(UTC).strftime(form) for form in ("%Y-%m-%d", "D:%Y%m%d")}
    for name, date in itertools.product(here, dates):
        assert date.encode() not in here[name], name


@pytest.mark.nightly
def test_a_training_differs_in_its_times_only(places: tuple[Place, Place]) -> None:
    """Parameters, checkpoints and losses are the same, bit for bit, on one process."""
    pytest.importorskip("torch")
    arguments = "--nproc 1 --size tiny --context 16 --steps 6 --batch 4 --log-every 2 -o out"
    one, other = (place.run("realrun train", arguments) for place in places)
    assert list(one) == list(other)
    timed = {"stdout", "log.csv", "train.json", "loss.png", "state.json"}
    changed = {Path(name).name for name in one if one[name] != other[name]}
    assert changed - timed == set()
    logs = [pd.read_csv(io.BytesIO(files["out/log.csv"])) for files in (one, other)]
    pd.testing.assert_frame_equal(*(log.drop(columns=["seconds", "waited"]) for log in logs))
