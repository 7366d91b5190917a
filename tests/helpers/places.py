"""Where the repository, its golden files and the data of tests are."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
DATA = ROOT / "tests" / "data"
