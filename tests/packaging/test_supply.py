"""What is installed and what is shipped, and that functions are short."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import audit
import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pages import commands
from places import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / ".requirements-dev.txt").read_text()
_PIN = r"^([\w.-]+)==(\S+)(?: ; (.*?))? \\\n((?:    --hash=sha256:[0-9a-f]{64}.*\n)+)"
PINS = re.findall(_PIN, LOCK, re.MULTILINE)
WITHOUT_HASH = {"torch"}
"""Its builds differ by index: with CUDA, or for CPUs. `pyproject.toml` names that of the tests."""


def test_the_lock_file_holds_all_that_development_needs() -> None:
    """Pins of `dev` and `chakra` are in it, and a version that every other requirement allows."""
    pinned = {name: {version for other, version, *_ in PINS if other == name} for name, *_ in PINS}
    extras = PROJECT["optional-dependencies"]
    needed = map(Requirement, [*PROJECT["dependencies"], *extras["dev"], *extras["chakra"]])
    for one in needed:
        name = re.sub(r"[-_.]+", "-", one.name).lower()
        if name in WITHOUT_HASH:
            assert name not in pinned
            continue
        assert pinned[name], name
        assert all(one.specifier.contains(version) for version in pinned[name]), name


def test_an_audit_passes_only_if_all_was_looked_up() -> None:
    """An index without vulnerabilities, such as a mirror, is not a clean bill."""
    clean = {"name": "a", "version": "1", "vulns": []}
    flawed = {**clean, "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}
    skipped, ours = ({"name": name, "skip_reason": "not found"} for name in ("b", audit.OURS))
    for packages, code, words in (
        ([clean], 0, "0 known"),
        ([flawed], 1, "CVE-1"),
        ([skipped], 2, "nothing was checked"),
        ([clean, skipped], 2, "not looked up: b"),
        ([ours], 2, "nothing was checked"),
    ):
        found, lines = audit.judge({"dependencies": packages})
        assert found == code
        assert words in "\n".join(lines)


# --- what is built ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `dist`, made from a clone without tags and one commit deep."""
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    clone = ["git", "clone", "--quiet", "--depth", "1", "--no-tags", f"file://{ROOT}", str(source)]
    subprocess.run(clone, check=True)
    command = [sys.executable, "-m", "build", "--no-isolation"]
    command += ["--outdir", str(folder / "dist"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.mark.nightly
def test_the_source_distribution_builds_the_same_wheel(built: Path) -> None:
    """`build` makes the wheel from it: without git, its version stays, and all data is inside."""
    (source,), (wheel,) = ((built / "dist").glob(f"*.{kind}") for kind in ("tar.gz", "whl"))
    version = wheel.name.split("-")[1]
    assert source.name == f"co2sim_training-{version}.tar.gz"
    assert Version(version).local is None
    with ZipFile(wheel) as files:
        inside = set(files.namelist())
    for folder in ("co2sim", "realrun", "analysis"):
        wanted = {
            str(path.relative_to(ROOT))
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert wanted - inside == set()
    papers = {f"analysis/{path.relative_to(ROOT)}" for path in (ROOT / "papers").rglob("*.*")}
    assert papers - inside == set()
    with tarfile.open(source) as files:
        top = {name.split("/")[1] for name in files.getnames()}
    assert {"README.md", "shared", "out"}.isdisjoint(top)


@pytest.mark.nightly
def test_the_metadata_is_ready_for_the_index(built: Path) -> None:
    """Every field is valid by its specification, and the text has no link that leads nowhere."""
    with ZipFile(next((built / "dist").glob("*.whl"))) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        found = Metadata.from_email(files.read(name), validate=True)
    assert found.license_expression == "MIT"
    assert found.description_content_type == "text/markdown"
    assert "](" not in (found.description or "](")
    assert found.requires_python == SpecifierSet(">=3.11")


@pytest.mark.nightly
def test_the_commands_of_the_readme_run_from_the_wheel(built: Path) -> None:
    """In an environment of its own, in a folder with nothing but the examples that they name.

    What the wheel requires comes from the environment of the tests, behind it on the path.
    """
    place = built / "place"
    venv.create(place / "venv", with_pip=True)
    python = place / "venv" / "bin" / "python"
    wheel = next((built / "dist").glob("*.whl"))
    install = ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([str(python), "-m", "pip", *install], check=True, capture_output=True)
    site = next((place / "venv" / "lib").glob("python*/site-packages"))
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    shutil.copytree(ROOT / "examples", place / "examples")
    env = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    env.pop("PYTHONPATH", None)
    also = ["co2analysis goodput --json", "co2sim list gpus", "realrun lab cluster"]
    for command in [*commands(ROOT / "README.md"), *also]:
        done = subprocess.run(
            shlex.split(command), cwd=place, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stderr)
    where = "import analysis, co2sim, realrun; print(analysis, co2sim, realrun)"
    done = subprocess.run(
        [str(python), "-c", where], cwd=place, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.count(str(site)) == 3


# --- source text ------------------------------------------------------------------------------


FOLDERS = ("co2sim", "realrun", "analysis", "benchmarks", "examples", "docs")

LONGEST = 60

COMMAND_LINES = {
    ("analysis/cli/convergence.py", "tau"),
    ("analysis/cli/measured.py", "lab"),
}
"""Functions that may be longer: an argument for every option, with its help."""


def sources(*folders: str) -> Iterator[Path]:
    """The Python files below some folders."""
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions and methods of a file, at every depth."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def length(node: ast.stmt) -> int:
    """Lines of a statement, without decorators."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_no_function_is_longer_than_60_lines_but_declared_command_lines() -> None:
    """The list holds no name that does not need it."""
    long = {
        (str(path.relative_to(ROOT)), node.name)
        for path in sources(*FOLDERS)
        for node in functions(path)
        if length(node) > LONGEST
    }
    assert long == COMMAND_LINES
