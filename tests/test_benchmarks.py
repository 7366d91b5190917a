"""Every script of benchmarks/ runs and leaves results alone; none of them imports in a cycle."""

import argparse
import ast
import functools
import json
import shutil
import subprocess
import sys
import time
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from realrun.errors import LabError
from realrun.launch.lab import check_machine

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks"
SCRIPTS = {
    "chaos.py": [pytest.mark.dist],
    "checkpoints.py": [],
    "collectives.py": [pytest.mark.lab],
    "convergence.py": [pytest.mark.dist],
    "engines.py": [
        pytest.mark.skipif(
            not (find_spec("distributed") and find_spec("pyarrow")),
            reason="the extra `dask` is not installed",
        )
    ],
    "explore.py": [
        pytest.mark.skipif(
            not (shutil.which("chromium-headless-shell") or shutil.which("chromium")),
            reason="no Chromium: apt-get install chromium-headless-shell",
        )
    ],
    "failures.py": [pytest.mark.dist],
    "fidelity.py": [pytest.mark.lab],
    "fidelity_turns.py": [pytest.mark.lab],
    "fuzz.py": [],
    "hpz_group.py": [],
    "long_study.py": [pytest.mark.dist],
    "overhead.py": [],
    "peers.py": [pytest.mark.lab],
    "quantization.py": [],
    "required_bandwidth.py": [],
    "speed.py": [],
    "ssp.py": [pytest.mark.dist],
    "step_factors.py": [],
    "tasks.py": [pytest.mark.lab],
    "time_to_loss.py": [pytest.mark.lab],
}
ARGUMENTS = {"fidelity.py": ["sleep"]}
CELLS = {"time_to_loss.py": {"torch post-local SGD", "CO2, delay auto"}}
"""In the table. A method that fails is not in it, or has more words behind its name."""

pytestmark = pytest.mark.slow  # every script runs for seconds


def results() -> dict[str, tuple[int, int]]:
    """The files of results, with their sizes and times."""
    files = (FOLDER / "results").iterdir()
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=marks, id=name) for name, marks in SCRIPTS.items()]
)
def test_every_script_has_a_quick_run(
    script: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """It prints a table, and what made it; the results of long runs stay as they are."""
    if request.node.get_closest_marker("lab"):
        try:
            check_machine()
        except LabError as error:
            pytest.skip(str(error))
    before = results()
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *ARGUMENTS.get(script, []), "--quick"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("|:--") for line in lines), done.stdout
    assert any(line.startswith(f"Made by `python benchmarks/{script} ") for line in lines)
    assert CELLS.get(script, set()) <= {cell.strip() for line in lines for cell in line.split("|")}
    assert results() == before
    assert not list(tmp_path.iterdir())


def test_no_script_is_forgotten() -> None:
    """Whatever can be started is in the table above, and make knows it."""
    started = {path.name for path in FOLDER.glob("*.py") if "__main__" in path.read_text()}
    assert started == SCRIPTS.keys()
    makefile = (ROOT / "Makefile").read_text()
    assert [name for name in started if f"benchmarks/{name}" not in makefile] == []


def imports(path: Path) -> set[str]:
    """Other modules of its folder that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name for name in names if (path.parent / f"{name}.py").exists()}


def test_benchmarks_import_no_cycle(tmp_path: Path) -> None:
    """Also inside of functions; a cycle of two files would be seen."""
    graph = {path.stem: imports(path) for path in FOLDER.glob("*.py")}
    assert "reports" in list(TopologicalSorter(graph).static_order())
    (tmp_path / "a.py").write_text("def f():\n    from b import g\n")
    (tmp_path / "b.py").write_text("import a\n")
    cyclic = {path.stem: imports(path) for path in tmp_path.glob("*.py")}
    with pytest.raises(ValueError, match="cycle"):
        list(TopologicalSorter(cyclic).static_order())


def test_tables_say_what_made_them() -> None:
    """Every result in Markdown ends with its command and a commit."""
    for path in (FOLDER / "results").glob("*.md"):
        last = path.read_text().rstrip().splitlines()[-1]
        assert last.startswith("Made by `"), path
        assert " commit " in last, path


def test_the_speed_table_says_which_targets_are_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median decides, and of several targets each; a target is written as it is checked."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import speed  # type: ignore[import-not-found]  # noqa: PLC0415 - a folder of scripts

    times = [0.009, 0.010, 5.0]
    assert speed.limited("x", times, 10, "ms").cells == {
        "what": "x",
        "median": "10.0 ms",
        "range": "9.0 - 5000.0",
        "target": "<= 10 ms",
        "met": "yes",
    }
    assert speed.limited("x", times, 9.9, "ms").cells["met"] == "no"
    ratios = {ratio: speed.Target(ratio, 1.2, "x", least=0.8) for ratio in (0.79, 0.8, 1.2, 1.21)}
    assert [target.met for target in ratios.values()] == [False, True, True, False]
    two = [speed.within(times, 10, "s"), speed.Target(2.5, 2, "GiB")]
    cells = speed.SpeedLine("x", times, "s", two).cells
    assert (cells["target"], cells["met"]) == ("<= 10 s, <= 2 GiB", "no")


CALCULON = """
class Application:
    def __init__(self, given): self.given = given
class Execution:
    from_json = staticmethod(dict)
class Llm:
    Application, Execution = Application, Execution
    def __init__(self, model, logger): self.model = model.given
    def compile(self, hardware, execution): hardware.done = [self.model, execution]
    def run(self, hardware): hardware.done.append("run")
"""


def test_peers_run_in_turn_with_us_where_they_are_and_say_why_where_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins of a checkout and a command are timed as ratios; what is broken says so."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import speed  # noqa: PLC0415 - as above
    import speed_peers  # type: ignore[import-not-found]  # noqa: PLC0415

    monkeypatch.delenv("CALCULON", raising=False)
    monkeypatch.delenv("ASTRA_SIM", raising=False)
    assert speed_peers.found() == dict.fromkeys(
        ("Calculon", "SimuMax", "ASTRA-sim"), speed_peers.ABSENT
    )
    files = {
        "calculon/__init__.py": "",
        "calculon/llm.py": CALCULON,
        "calculon/system.py": "class System:\n    def __init__(self, given): pass\n",
        "models/llama2-7b.json": "{}",
        "examples/3072_t1_p1_d1_mbs1_full.json": "{}",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("CALCULON", str(tmp_path))
    monkeypatch.setenv("ASTRA_SIM", f"{sys.executable} -c pass")
    assert str(speed_peers.found()["Calculon"]).startswith("cannot be run: FileNotFoundError")
    (tmp_path / "systems").mkdir()
    (tmp_path / "systems/a100_80e.json").write_text("{}")
    ours, calculon, simumax, astra = speed.beside_peers(1)
    assert ours["ratio"] == "1.00"
    assert 0 <= float(calculon["ratio"]) < 1 < float(astra["ratio"])
    assert simumax == {"what": "SimuMax", "median": "not installed", "range": "", "ratio": ""}


def test_without_out_a_long_run_goes_to_the_results_and_a_quick_one_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And --out goes where it says, in both cases."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import reports  # type: ignore[import-not-found]  # noqa: PLC0415 - a folder of scripts

    monkeypatch.setattr(reports, "RESULTS", tmp_path / "results")
    command: argparse.ArgumentParser = reports.parser("A benchmark.\n\nMore.", "short")

    def place(*arguments: str) -> Path:
        with reports.folder(command.parse_args(arguments)) as out:
            assert out.is_dir()
            found: Path = out
        return found

    assert place() == tmp_path / "results"
    assert place("--out", str(tmp_path / "a")) == tmp_path / "a"
    assert place("--quick", "--out", str(tmp_path / "b")) == tmp_path / "b"
    quick = place("--quick")
    assert quick.parent != tmp_path
    assert not quick.exists()


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of scripts can be imported from."""
    monkeypatch.syspath_prepend(str(FOLDER))


def finished(plan: Any, ask: Any, losses: list[float], step_s: float = 0.02) -> dict[str, Any]:
    """The row of a run with a validation every 12 steps."""
    from time_to_loss_plan import KEY  # type: ignore[import-not-found]  # noqa: PLC0415

    curve = [[12 * (i + 1), 12 * (i + 1) * step_s, loss] for i, loss in enumerate(losses)]
    row = dict(zip(KEY, ask.key(plan), strict=True))
    return {**row, "step_s": step_s, "curve": json.dumps(curve), "error": ""}


@pytest.mark.usefixtures("scripts")
def test_runs_of_time_to_loss_are_interleaved_and_kept(tmp_path: Path) -> None:
    """Each seed has calibrations, then all methods; a finished run, once read, is not asked again.

    The loss to reach is the worst that any run without a lab ends with, so that all reach it.
    """
    from time_to_loss_contenders import (  # type: ignore[import-not-found]  # noqa: PLC0415
        CALIBRATIONS,
        CONTENDERS,
        REFERENCE,
        SMALL_AVERAGES,
    )
    from time_to_loss_plan import (  # noqa: PLC0415 - a folder of scripts
        FREE,
        Plan,
        append,
        enough,
        lab_asks,
        next_run,
        read,
        target_of,
    )

    plan = Plan(seeds=(0, 1), rates=("100 Mbit/s",))
    count = 0
    while (ask := next_run(plan, read(tmp_path), tmp_path, FREE)) is not None:
        count += 1
        # the reference's two come first, and let the others end
        assert (ask.entry.name == REFERENCE) == (count in {1, 2})
        assert enough(plan, read(tmp_path), tmp_path) == (2.02 if count > 2 else None)
        append(tmp_path, finished(plan, ask, [3.0, 2.0 + count / 100]))
    known = read(tmp_path)
    methods = len([one for one in CONTENDERS if one.name in {key[2] for key in known}])
    assert methods >= len(CONTENDERS) - 2  # torchft may be missing
    assert count == len(known) == 2 * methods
    assert target_of(plan, known, tmp_path) == 2.0 + count / 100

    asks = list(lab_asks(plan, known, tmp_path, "100 Mbit/s"))
    small = any(ask.entry == SMALL_AVERAGES for ask in asks)
    assert small == any(ask.entry.tensor_by_tensor for ask in asks)
    # 2: CO2 that chooses its delay, which sends nothing
    each = len(CALIBRATIONS) + small + 2 + methods
    assert [ask.seed for ask in asks] == [0] * each + [1] * each
    assert [ask.entry for ask in asks[: len(CALIBRATIONS)]] == list(CALIBRATIONS)
    assert next_run(plan, known, tmp_path, "100 Mbit/s") == asks[0]
    append(tmp_path, finished(plan, asks[0], []))
    assert next_run(plan, read(tmp_path), tmp_path, "100 Mbit/s") == asks[1]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch, importing
@pytest.mark.usefixtures("scripts")
def test_a_step_at_a_pace_takes_that_long_before_anything_is_sent() -> None:
    """The rest of the time is waited for before the optimizer's step; slower ones are counted."""
    from time_to_loss_methods import Pace  # type: ignore[import-not-found]  # noqa: PLC0415

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(torch.ones(1, 1)).sum().backward()  # the first pass of all is slow
    pace = Pace(1.0)
    pace.attach(SimpleNamespace(bare=model, model=model, optimizer=optimizer))
    ended: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: ended.append(time.monotonic()))
    for busy in (0.0, 1.05):
        began = time.monotonic()
        model(torch.ones(1, 1)).sum().backward()
        time.sleep(busy)
        optimizer.step()
        assert ended[-1] - began >= 1.0
    assert (pace.steps, pace.late) == (2, 1)


@pytest.mark.usefixtures("scripts")
def test_the_loss_falls_evenly_between_validations() -> None:
    """The target is crossed on the straight line; at the first validation there is none."""
    from time_to_loss_plan import reached  # noqa: PLC0415 - a folder of scripts

    points = [(12.0, 1.0, 3.0), (24.0, 5.0, 2.0), (36.0, 6.0, 2.5), (48.0, 7.0, 1.0)]
    assert reached(points, 2.25) == pytest.approx((21.0, 4.0, 2.25))
    assert reached(points, 1.75) == pytest.approx((42.0, 6.5, 1.75))
    assert reached(points, 3.5) == (12.0, 1.0, 3.0)
    assert reached(points, 0.5) is None


@pytest.mark.usefixtures("scripts")
def test_contenders_are_tuned_as_in_the_study(tmp_path: Path) -> None:
    """Lr and outer step of the best line; CO2 with a delay keeps what the nearest delay keeps."""
    from time_to_loss_contenders import contenders  # noqa: PLC0415 - a folder of scripts

    (tmp_path / "convergence.csv").write_text(
        "configuration,loss,lr,outer\n"
        "LocalSGD 12,1.9,0.02,\n"
        '"CO2 12, plain",2.2,0.03,"momentum=0,lr=1"\n'
        '"CO2 12, gap",2.1,0.04,"momentum=0.5,lr=1"\n'
        '"CO2 delay 1, tau 12",1.91,0.05,keep=1\n'
        '"CO2 delay 4, tau 12",1.95,0.06,"keep=0.25,predict=1,momentum=0.2,lr=0.9"\n'
        '"CO2 delay 1, tau 2",1.8,0.07,keep=0.25\n'
    )
    for number, kept, outer, lr in (
        (1, "keep=1", "", 0.05),
        (3, "keep=0.25,predict=1", "momentum=0.2,lr=0.9", 0.06),
    ):
        choose = functools.partial(lambda entry, number: (entry, number), number=number)
        found = {one.name: one for one in contenders((), tmp_path, choose)}
        assert found["torch post-local SGD"].lr == found["LocalSGD"].lr == 0.02
        published = found["CO2 as published"]
        assert (published.lr, published.outer) == (0.04, "momentum=0.5,lr=1")
        late = found["CO2, delay auto"]
        assert (late.lr, late.strategy) == (lr, f"co2:tau=12,delay=auto,{kept}")
        assert late.outer == outer
        assert found["DiLoCo"].lr == 5e-3  # the study has no line: as stated in the script


@pytest.mark.usefixtures("scripts")
def test_a_predicted_step_takes_what_was_calibrated_into_account() -> None:
    """Sending slows only what runs meanwhile: nothing under LocalSGD, the steps under a late CO2.

    Cores that prepare messages all the time are slower than the network, or are not seen.
    """
    from time_to_loss_predict import (  # type: ignore[import-not-found]  # noqa: PLC0415
        Calibrated,
        Place,
        network_efficiency,
        predicted_step,
    )

    place = Place(4, "100 Mbit/s", "mini", 8)
    whole = predicted_step(place, "local_sgd:tau=12", Calibrated(0.027))
    slow = Calibrated(0.027, interference=0.1)
    assert predicted_step(place, "local_sgd:tau=12", slow) == pytest.approx(whole)
    late = [
        predicted_step(place, "co2:tau=12,delay=4", found) for found in (Calibrated(0.027), slow)
    ]
    average = 12 * (whole - 0.027)
    assert 12 * (late[1] - late[0]) == pytest.approx(0.1 / 1.1 * average, rel=0.02)
    # A network that attains 4/5 of its rate, as one average after each step tells.
    found = Calibrated(0.027, efficiency=0.8)
    averaging = predicted_step(place, "local_sgd:tau=1", found)
    assert network_efficiency(place, 0.027, averaging) == pytest.approx(0.8, rel=0.03)
    assert network_efficiency(place, 0.027, 0.028) == 1
    for messages, step in ((0.028, whole), (0.04, 0.04)):
        found = Calibrated(0.027, messages=messages)
        assert predicted_step(place, "local_sgd:tau=12", found) == step


@pytest.mark.usefixtures("scripts")
def test_tau_and_delay_are_as_many_steps_as_an_average_takes() -> None:
    """Of 81 ms: 4 steps of 25 ms, since of 3 more than 1 % would be exposed; 3 of 28 ms."""
    from time_to_loss_predict import (  # noqa: PLC0415 - a folder of scripts
        Calibrated,
        Place,
        predicted_step,
        shortest_round,
        with_delay,
    )

    place = Place(4, "100 Mbit/s", "mini", 8)
    for step, least in ((0.025, 4), (0.028, 3)):
        whole = predicted_step(place, "local_sgd:tau=12", Calibrated(step))
        average = 12 * (whole - step)
        assert (least - 1) * step < 0.99 * average < least * step
        assert with_delay(place, "co2:tau=12,delay=auto,fragments=1", step).delay == least
        assert shortest_round(place, "co2:tau=auto,delay=auto,fragments=1", step) == least


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch, importing
@pytest.mark.usefixtures("scripts")
def test_co2_takes_the_delay_that_it_is_told(tmp_path: Path) -> None:
    """Without a lab the delay that co2sim chose stands for what would be measured."""
    from time_to_loss_plan import Ask, Plan, tuned  # noqa: PLC0415 - a folder of scripts
    from time_to_loss_runs import settings_of  # type: ignore[import-not-found]  # noqa: PLC0415

    plan, rate = Plan(), "100 Mbit/s"
    (entry,) = (one for one in tuned(plan, tmp_path, rate) if one.name == "CO2, delay auto")
    free, lab = (settings_of(plan, Ask(entry, rate, 0, delay), 0) for delay in (3, 0))
    assert free.strategy == "co2:tau=12,delay=3,fragments=12,keep=0.5,predict=0.5"
    assert lab.strategy == "co2:tau=12,delay=auto,keep=0.5,predict=0.5"
