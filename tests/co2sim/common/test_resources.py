"""What a simulation may take: ceilings, and memory that is asked for before it is used."""

import io
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import co2sim
from co2sim import Question, ResourceError
from co2sim.common import resources
from co2sim.prediction import driver
from co2sim.simulation import lowering

SMALL: dict[str, Any] = {"cluster": "a100-tcp80", "model": "gpt2-small", "gpus": 16}

LIMITED = """
import resource
import sys
from pathlib import Path
import co2sim
from co2sim.common import resources
from co2sim.simulation import lowering
even = {"node_spread": "0"}  # nodes that differ are simulated twice
co2sim.simulate("a100-tcp80", "gpt2-small", "ddp", gpus=16, overrides=even)  # loads all there is
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
room = 100e6
resource.setrlimit(resource.RLIMIT_AS, (int(mapped + room), int(mapped + room)))
ops = len(co2sim.Question(cluster="a100-tcp80", model="gpt2-small", strategy="ddp", gpus=16)
          .stage().schedule.body)
allowed = int(0.9 * resources.free_memory() / 2 / lowering.SPAN_BYTES / ops)
for rounds in (allowed, 2 * allowed, 1_000_000):
    try:
        found = co2sim.simulate(
            "a100-tcp80", "gpt2-small", "ddp", gpus=16, rounds=rounds, overrides=even
        )
        print("done", found.rounds_simulated >= rounds)
    except co2sim.ResourceError as error:
        print("refused", str(error).count(chr(10)), error)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is read from /proc")
def test_under_a_limit_of_memory_a_run_fits_or_is_refused() -> None:
    """Under `ulimit -v`: what the check allows runs through, what it does not is one line."""
    ran = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True, timeout=600
    )
    allowed, doubled, huge = ran.stdout.splitlines()
    assert allowed == "done True"
    for refused in (doubled, huge):
        assert refused.startswith("refused 0 ")
        assert "this needs about" in refused


def test_the_search_for_a_steady_state_ends_where_memory_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was found before is the answer, marked as not steady; with more memory it is steady."""
    case = Question(**SMALL, strategy="co2.published(tau=4)", noise=co2sim.Noise(straggle=0.1))
    steady = driver.run(case)
    assert steady.steady
    assert steady.rounds_simulated > 4
    schedule = case.stage().schedule
    room = 3 * len(schedule.body) * 2 * lowering.LOCKSTEP_SPAN_BYTES  # 3 rounds of 2 nodes
    monkeypatch.setattr(resources, "NEGLIGIBLE", 0)
    monkeypatch.setattr(resources, "free_memory", lambda: 2 * room)
    found = driver.run(case)
    assert not found.steady
    assert found.rounds_simulated <= 3
    monkeypatch.setattr(resources, "free_memory", lambda: room)
    with pytest.raises(ResourceError, match=r"; take fewer GPUs$"):
        driver.run(case)
    uneven = Question(**SMALL, strategy="co2.published(tau=4)", noise=co2sim.Noise(jitter=0.1))
    with pytest.raises(ResourceError, match="no jitter"):
        driver.run(uneven)


MEASURED = """
from pathlib import Path
from co2sim import Question, Noise
from co2sim.prediction import driver
from co2sim.simulation import lowering
case = Question(cluster="dgx-h100", model="gpt2-xl", strategy="zero3", gpus=32, rounds=80,
            noise=Noise(jitter=0.05))
prepared = case.stage()
def peak():
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x)
    return int(line.split()[1]) * 1024
before = peak()
driver.run(case)
spans = lowering.span_count(prepared.schedule, prepared.cluster, rounds=81, noise=case.noise)
print((peak() - before) / spans, lowering.LOCKSTEP_SPAN_BYTES)
"""


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_a_span_in_lockstep_takes_what_is_asked_for() -> None:
    """The strategy that took most of all: the peak is below the estimate, and above its third."""
    ran = subprocess.run(
        [sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True, timeout=600
    )
    seen, estimate = map(float, ran.stdout.split())
    assert estimate / 3 < seen <= estimate


def test_a_schedule_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """14 blocks, forwards and backwards, 1000 times: 28,000 ops of 500 B need 14 MB."""
    case = Question(**SMALL, strategy="ddp", accumulation=1000)
    monkeypatch.setattr(resources, "free_memory", lambda: 29e6)
    replace(case, micro_batch=2).stage()  # another one: a schedule that was built is kept
    monkeypatch.setattr(resources, "free_memory", lambda: 27e6)
    with pytest.raises(ResourceError, match=r"28,000 ops.* about 14 MB"):
        case.stage()


def _container(folder: Path, **files: str) -> Path:
    folder.mkdir()
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)
    return folder


def test_free_memory_is_the_least_of_machine_and_container(tmp_path: Path) -> None:
    """A container's limit counts, less its use, but for the cache that it gives back."""
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable:    8000000 kB\n")
    assert resources.free_memory(proc, tmp_path / "none") == 8_192_000_000
    limits = {"memory_current": "3000000000", "memory_stat": "anon 5\ninactive_file 500000000\n"}
    small = _container(tmp_path / "small", memory_max="4000000000", **limits)
    assert resources.free_memory(proc, small) == 1_500_000_000
    open_ended = _container(tmp_path / "open", memory_max="max", **limits)
    assert resources.free_memory(proc, open_ended) == 8_192_000_000
    assert resources.free_memory(tmp_path / "none", tmp_path / "none") == float("inf")


class Terminal(io.StringIO):
    """What a terminal is, as far as a bar of progress asks."""

    def isatty(self) -> bool:
        """It is one."""
        return True


def _on_a_terminal(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> str:
    """What the work writes to a terminal of 80 columns as its stderr."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal := Terminal())
        work()
    return terminal.getvalue()


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda shown: co2sim.simulate(**SMALL, strategy="ddp", progress=shown), "rounds"),
        (lambda shown: co2sim.sweep(**SMALL, vary={"strategy": "ddp"}, progress=shown), "cases"),
        (lambda shown: co2sim.scale("dgx-h100", "gpt2-small", "ddp", progress=shown), "cases"),
    ],
    ids=["simulate", "sweep", "scale"],
)
def test_long_work_shows_how_far_it_is_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[bool | None], object], words: str
) -> None:
    """On a terminal a bar counts rounds or cases; when told not to, stderr stays empty."""
    monkeypatch.setattr(driver, "_PATIENCE", 0.0)
    text = _on_a_terminal(monkeypatch, lambda: work(None))
    assert f"simulating {words}" in text
    assert re.search(r"[0-9]+/[0-9]+", text)
    assert _on_a_terminal(monkeypatch, lambda: work(False)) == ""  # noqa: FBT003
