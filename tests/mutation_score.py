"""Say how many mutants the tests notice, and end with exit code 1 below 85 %: `make mutants`."""

import json
import sys
from pathlib import Path

LEAST = 0.85


def score(counts: dict[str, int]) -> float:
    """The share of mutants that a test fails on, or that never end, of all that were tried."""
    tried = counts["total"] - counts["skipped"]
    return (counts["killed"] + counts["timeout"] + counts["segfault"]) / tried if tried else 0.0


def main(path: Path) -> int:
    """Print the score of the counts in `path`."""
    counts = json.loads(path.read_text())
    found = score(counts)
    print(  # noqa: T201 - what the command is for
        f"{found:.1%} of {counts['total']} mutants are noticed ({counts['survived']} survived,"
        f" {counts['no_tests']} have no test); at least {LEAST:.0%} are asked for"
    )
    return 0 if found >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
