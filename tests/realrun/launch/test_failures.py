"""When a rank dies, hangs or raises: all stop in time, say who and where, and leave nothing."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
import rank_main
from ranks import forked

from co2sim.simulation.trace import read_json_lines

DEADLINE = 3.0
"""Seconds that the ranks of these tests wait for each other."""
HEART = {"PERIOD": "0.1", "SILENT": "0.8"}

STOPPED = r"stopped (in|after) '\S+' of round [01]"
"""Who is told of a failure may be between two ops, or just behind the rank that failed."""

CLUSTER = """
name = "slow loopback"
source = "for this test"
nodes = 1
gpus_per_node = 3
gpu = "virtual"
backend = "gloo"
intra = { bandwidth = "1 GB/s", latency = "50 us" }
inter = { bandwidth = "1 GB/s", latency = "50 us" }
"""


@pytest.mark.dist
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("kill:compute:2", rf"rank 2 was killed by SIGKILL; {STOPPED}"),
        *(
            pytest.param(fault, said, marks=pytest.mark.nightly)
            for fault, said in (
                ("kill:startup:1", "rank 1 was killed by SIGKILL"),
                ("kill:clocks:1", "rank 1 was killed by SIGKILL"),
                ("kill:inside:1", rf"rank 1 was killed by SIGKILL; {STOPPED}"),
                ("kill:before:0", rf"rank 0 was killed by SIGKILL; {STOPPED}"),
                ("stop:compute:1", r"rank 1 gives no sign of life; stopped in '\S+' of round 1"),
                ("hang:compute:2", r"rank 2 is not there: it is in '\S+' of round 1"),
                ("raise:compute:0", r"rank 0 raised ValueError in '\S+' of round 1"),
                ("stop:startup:2", rf"rank 2 did not come within {DEADLINE:g} s"),
            )
        ),
    ],
)
def test_all_ranks_stop_in_time_and_name_the_missing_one(
    fault: str, said: str, tmp_path: Path
) -> None:
    """Exit code 1; survivors say on one line who failed, where they were, and where spans are.

    If the run had started, they are of round 0 at least.
    """
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    case = "run -c cluster.toml -m gpt2-small -s ddp --kernels sleep --set model.layers=2"
    arguments = [*case.split(), "--deadline", f"{DEADLINE} s"]
    code = forked(3, rank_main.command, tmp_path, arguments, FAULT=fault, **HEART)
    assert code == 1
    for rank in {0, 1, 2} - {int(fault[-1])}:
        text = (tmp_path / f"err{rank}").read_text()
        (line,) = re.findall(r"error: (.*)$", text, re.MULTILINE)
        assert re.search(said, line), text
        if not re.search("startup|clocks", fault):
            spans = Path("out") / "ddp" / "partial" / f"rank{rank}.jsonl"
            assert str(spans) in line
            assert {span.round for span in read_json_lines(tmp_path / spans).spans} >= {0}
