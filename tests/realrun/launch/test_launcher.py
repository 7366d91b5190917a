"""Ranks are started as torchrun would, watched, and never left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest
from memory_store import Memory

from realrun.errors import LaunchError
from realrun.launch.launcher import rank_environment, run_local
from realrun.launch.monitor import supervise
from realrun.launch.processes import RankProcess, start

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
LAUNCH = """
import sys
from realrun.launch.launcher import run_local
sys.exit(run_local(sys.argv[1:], 2, grace=30.0))
"""


def shells(*scripts: str) -> list[RankProcess]:
    """One rank a script."""
    return [start(rank, ["bash", "-c", script], {}) for rank, script in enumerate(scripts)]


def wait_until(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether it became true in time."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if true():
            return True
        time.sleep(0.02)
    return False


def alive(mark: str) -> list[psutil.Process]:
    """The processes `sleep MARK`."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        dead = process.info["status"] == psutil.STATUS_ZOMBIE
        if process.info["cmdline"] == ["sleep", mark] and not dead:
            found.append(process)
    return found


@pytest.fixture
def mark(request: pytest.FixtureRequest) -> str:
    """A number of seconds that no other process sleeps for."""
    return f"1000.{os.getpid()}{abs(hash(request.node.name)) % 10**6}"


def test_environment_is_that_of_torchrun() -> None:
    """Rank 5 of 2 nodes of 4 is number 1 on node 1, and is a client of the launcher's store."""
    found = rank_environment(5, 8, local_world_size=4, address="10.0.0.1", port=1234)
    expected = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    assert found.items() >= expected.items()


def test_what_cannot_run_is_refused() -> None:
    """Before anything is started, in one line."""
    for command, message in [
        ([], "no command is given"),
        (["no-such-program"], "command not found: no-such-program"),
    ]:
        with pytest.raises(LaunchError, match=message) as caught:
            run_local(command, 2)
        assert "\n" not in str(caught.value)


@pytest.mark.dist
def test_output_is_passed_on_with_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    """Every line has its rank in front, except the results: rank 0's stdout is untouched."""
    ranks = shells(
        r"printf '{\n'; echo note >&2; sleep 0.3; printf ' \xc3\xa9}'",
        "echo a; echo; printf b; echo error >&2",
    )
    assert supervise(ranks, Memory(), 30) == 0
    out, err = capfd.readouterr()
    lines = out.splitlines(keepends=True)
    others = [line for line in lines if line.startswith("[rank 1] ")]
    assert others == ["[rank 1] a\n", "[rank 1] \n", "[rank 1] b\n"]
    assert [line for line in lines if line not in others] == ["{\n", " é}"]
    assert sorted(err.splitlines()) == ["[rank 0] note", "[rank 1] error"]


@pytest.mark.dist
def test_failure_is_named_and_told(capfd: pytest.CaptureFixture[str]) -> None:
    """The exit code is 1, one line names the rank, and the store says so before it counts it."""
    for script, reason in [
        ("exit 3", "exited with code 3"),
        ("kill -9 $$", "was killed by SIGKILL"),
    ]:
        store = Memory()
        assert supervise(shells("sleep 0.3", "sleep 0.3", script), store, 30) == 1
        assert capfd.readouterr().err == f"error: rank 2 {reason}\n"
        told = json.loads(store.get("realrun/failure/0"))
        assert (told["rank"], told["reason"]) == (2, reason)
        assert store.values["realrun/failures"] == "1"
        assert store.log.index("realrun/failure/0") < store.log.index("realrun/failures")


@pytest.mark.dist
def test_who_does_not_stop_is_killed(capfd: pytest.CaptureFixture[str]) -> None:
    """Ranks that ignore signals, or are stopped, end when the grace does."""
    ranks = shells(
        "trap '' TERM INT HUP; while true; do sleep 0.1; done", "kill -STOP $$", "exit 3"
    )
    assert supervise(ranks, Memory(), 0.3) == 1
    message = "ranks 0, 1 did not stop and had to be killed"
    assert capfd.readouterr().err == f"error: rank 2 exited with code 3; {message}\n"
    assert ranks[1].process.returncode == -signal.SIGKILL


@pytest.mark.dist
def test_a_rank_without_a_heartbeat_is_killed_once_others_have_ended(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for a rank that is frozen in its last work, such as drawing: the launcher does.

    A command that has no heart may take as long as it likes.
    """
    monkeypatch.setattr("realrun.launch.monitor.SILENT", 0.5)
    store = Memory()
    store.set("realrun/heart/0", "the last beat")
    assert supervise(shells("kill -STOP $$", "true"), store, 30) == 1
    said = "error: rank 0 gave no sign of life for 0.5 s and had to be killed\n"
    assert capfd.readouterr().err == said
    assert supervise(shells("sleep 1", "true"), Memory(), 30) == 0


@pytest.mark.dist
def test_children_of_ranks_end_with_them(mark: str) -> None:
    """What a rank started and did not wait for is killed, and does not hold up the launcher."""
    assert supervise(shells(f"sleep {mark} & true", "true"), Memory(), 30) == 0
    assert wait_until(lambda: not alive(mark))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.nightly),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.nightly),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_no_process_is_left(number: signal.Signals, code: int, mark: str) -> None:
    """However the launcher ends, ranks end, and so does what they started; stopped ones, too."""
    script = f"sleep {mark} & (kill -STOP $BASHPID) & sleep {mark}"
    launched = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, "bash", "-c", script], env=ENVIRONMENT
    )
    try:
        assert wait_until(lambda: len(alive(mark)) == 4, 90)
        launched.send_signal(number)
        assert launched.wait(30) == code
        assert wait_until(lambda: not alive(mark))
    finally:
        for process in alive(mark):
            process.kill()
        launched.wait()
