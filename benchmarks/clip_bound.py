"""The bounds with clipping on 100,000 exact runs that clip and as many that do not.

    python benchmarks/clip_bound.py            # five minutes of one core

Writes benchmarks/results/clip_bound.md; `co2analysis verify` has the same cells.
"""

import time
from pathlib import Path

from analysis.convergence.protocol import checks, clip_checks
from analysis.convergence.report import clipping_markdown

RESULTS = Path(__file__).parent / "results" / "clip_bound.md"


def main() -> None:
    """Measure, judge, write."""
    began = time.process_time()
    findings = clip_checks.summary([task.measure() for task in clip_checks.plan(quick=False)])
    judged = list(checks.clipping_checks(findings, quick=False))
    verdicts = "".join(
        f"- {check.claim}: {'holds' if check.passed else 'FAILS'} ({check.measured})\n"
        for check in judged
    )
    minutes = (time.process_time() - began) / 60
    made = f"By `python benchmarks/clip_bound.py`, {minutes:.0f} minutes of one core."
    head = f"# Bounds with clipping\n\n{made}\n"
    RESULTS.write_text(f"{head}\n{verdicts}\n{clipping_markdown(findings)}")
    print(verdicts)


if __name__ == "__main__":
    main()
