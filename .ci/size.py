"""How large the code is, and what one call goes through, beside a week ago: for the log of CI."""

import ast
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT, PACKAGES = Path(__file__).resolve().parents[1], ("co2sim", "realrun", "analysis")
FOLDERS = {"packages": PACKAGES, "tests": ["tests"], "benchmarks": ["benchmarks"]}
VAGUE = ("found", "one", "place", "number", "known", "at", "given", "told", "asked", "own")
"""Names that do not say what a value is; `.ci/prose.py` has their limit."""
_FIELDS = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg"}
_CALL = """\
import sys, co2sim
calls = []
for note in None, lambda frame, *event: calls.append((event[0], frame.f_code.co_filename)):
    sys.setprofile(note)
    batch = {"micro_batch": 1, "accumulation": 1, "recompute": "none"}
    co2sim.simulate("dgx-h100", "llama-7b", "zero2", gpus=64, **batch)
files = [name for event, name in calls if event == "call"]
print(len({name for name in files if "/co2sim/" in name}), "files,", len(files), "calls")
"""


def vague_names(root: Path) -> int:
    """How often the packages bind one of VAGUE: variables, parameters and attributes."""
    count = 0
    for file in (path for package in PACKAGES for path in (root / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            name = getattr(node, _FIELDS.get(type(node), ""), None)
            count += name in VAGUE and isinstance(getattr(node, "ctx", ast.Store()), ast.Store)
    return count


def output(*line: str, cwd: Path = ROOT) -> str:
    """What a command line says; nothing where it fails."""
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, check=False).stdout.strip()


def figures(root: Path) -> dict[str, str]:
    """Of a checkout."""
    rows = {"vague names": str(vague_names(root))}
    rows["simulate()"] = output(sys.executable, "-c", _CALL, cwd=root)
    for what, folders in FOLDERS.items():
        files = [path for folder in folders for path in (root / folder).rglob("*.py")]
        lines = [path.read_text().count("\n") for path in files]
        large = sum(count > 800 for count in lines)
        rows[what] = f"{sum(lines)} lines, {len(lines)} files, {large} above 800 lines"
    return rows


if __name__ == "__main__":
    now, before = figures(ROOT), {}
    if commit := output("git", "rev-list", "-1", "--before=1 week ago", "HEAD"):
        with tempfile.TemporaryDirectory() as name:
            output("git", "worktree", "add", "--detach", name, commit)
            before = figures(Path(name))
            output("git", "worktree", "remove", "--force", name)
    for name, row in now.items():
        print(f"{name:12} {row:50} {before.get(name, '')}")
