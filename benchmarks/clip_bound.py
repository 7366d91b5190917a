"""The bounds with clipping on 100,000 exact runs that clip and as many that do not.

    python benchmarks/clip_bound.py            # five minutes of one core
    python benchmarks/clip_bound.py --quick    # the cells of `co2analysis verify --quick`

Writes clip_bound.md; `co2analysis verify` has the same cells.
"""

from reports import machine, made_by, parser, publish, table

from analysis.convergence.protocol import checks, clip_checks
from analysis.convergence.report import clipping_markdown


def main() -> None:
    """Measure, judge, write."""
    options = parser(__doc__, "fewer runs").parse_args()
    found = [task.measure() for task in clip_checks.plan(quick=options.quick)]
    findings = clip_checks.summary(found)
    rows = [
        {
            "must hold": check.claim,
            "": "holds" if check.passed else "FAILS",
            "measured": check.measured,
        }
        for check in checks.clipping_checks(findings, quick=options.quick)
    ]
    parts = [
        "# Bounds with clipping",
        table(rows),
        clipping_markdown(findings),
        machine(),
        made_by(),
    ]
    text = "\n\n".join(part.strip() for part in parts) + "\n"
    publish(options, "clip_bound", text)


if __name__ == "__main__":
    main()
