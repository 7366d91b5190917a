"""docs/performance.md says how fast the simulator is: `benchmarks/speed.py` on this machine."""

import re
import subprocess
import sys

import pytest
from places import ROOT

SECONDS = {"ms": 1e-3, "s": 1.0}
SLOWER = 3.0
MACHINE = "sum of 10 million numbers, to compare machines"


def medians(markdown: str) -> dict[str, float]:
    """Seconds by what was measured, without what is in parentheses, of the first table."""
    markdown = re.sub(" +", " ", markdown)
    rows = re.findall(r"^\| (.+?)(?: \(.*?\))? \| ([\d.]+) (ms|s) \|", markdown, re.MULTILINE)
    return {what: float(value) * SECONDS[unit] for what, value, unit in rows}


@pytest.mark.nightly
def test_no_row_is_three_times_slower_than_the_page_says() -> None:
    """Each beside a loop of Python, which says how fast the machine is."""
    page = (ROOT / "docs" / "performance.md").read_text("utf-8").partition("\n## ")[0]
    script = [sys.executable, "benchmarks/speed.py"]
    printed = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    stated, measured = medians(page), medians(printed)
    assert stated.keys() == measured.keys()
    machine = max(1.0, measured[MACHINE] / stated[MACHINE])
    slow = {
        what: (seconds, stated[what])
        for what, seconds in measured.items()
        if seconds > SLOWER * machine * stated[what]
    }
    assert not slow
