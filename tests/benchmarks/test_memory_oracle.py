"""The table of peaks by PyTorch's trackers is what its script measures."""

import csv
import importlib
import json
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest
from places import ROOT

FOLDER = ROOT / "benchmarks"
ROWS = {
    row["row"]: row
    for row in csv.DictReader(
        (FOLDER / "results/memory_oracle.csv").read_text("utf-8").splitlines()
    )
}
TORCH = {row["torch"] for row in ROWS.values()}


def quick_rows(*strategies: str) -> list[str]:
    """Numbers of the rows with the fewest layers that are run the least often."""
    found = []
    for strategy in strategies:
        rows = [row for row in ROWS.values() if row["strategy"] == strategy]
        work = {row["row"]: int(row["layers"]) * int(row["micro_steps"]) for row in rows}
        found.append(min(work, key=lambda number: work[number]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", quick_rows("fsdp2", "ddp"))
def test_a_row_is_measured_again(number: str) -> None:
    """Bytes of each kind and of each phase, the moment and the operator are the same.

    Which of two modules is at the peak changes, where both have it.
    """
    torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")
    if {torch.__version__} != TORCH:
        pytest.skip(f"the table is of torch {TORCH}, and this is {version('torch')}")
    done = subprocess.run(
        [sys.executable, str(FOLDER / "memory_oracle.py"), "--row", number],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    again = {name: str(value) for name, value in found.items() if name != "module"}
    assert again.items() <= ROWS[number].items()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch, importing
def test_the_table_has_all_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, with the inputs that the script has now."""
    pytest.importorskip("torch", reason="the extra `torch` is not installed")
    monkeypatch.syspath_prepend(str(FOLDER))
    oracle: Any = importlib.import_module("memory_oracle")
    settings = [
        {name: str(value) for name, value in oracle.inputs(setting).items()}
        for setting in oracle.settings()
    ]
    assert list(ROWS) == [str(number) for number in range(len(settings))]
    assert all(
        setting.items() <= row.items() for setting, row in zip(settings, ROWS.values(), strict=True)
    )


def test_kinds_add_up_to_the_peak() -> None:
    """Whatever the tracker counts has a column, and no phase has more than the peak."""
    kinds = [
        *("parameters_bytes", "gathered_bytes", "gradients_bytes", "unsharded_gradients_bytes"),
        *("activations_bytes", "temporaries_bytes", "optimizer_bytes", "communication_bytes"),
    ]
    for row in ROWS.values():
        peak = int(row["peak_bytes"])
        assert sum(int(row[kind]) for kind in kinds) == peak
        phases = [int(value) for name, value in row.items() if name.startswith("peak_")]
        assert max(phases) == peak
