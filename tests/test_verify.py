"""`co2analysis verify`: it holds, it can fail, it goes on where it was, and its report is whole."""

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from same_bytes import ROOT, Place

from analysis.cli import convergence
from analysis.convergence import bound, report
from analysis.convergence.bound import Bound, Infeasible
from analysis.convergence.protocol import checks, store, tightness
from analysis.convergence.protocol.check import Check
from analysis.convergence.protocol.checks import Findings
from analysis.convergence.protocol.grid import GridCell
from analysis.convergence.protocol.store import Cell
from analysis.convergence.setting import Setting
from co2sim.report import markdown

pytestmark = pytest.mark.slow  # the quick protocol takes 20 s

_ARGUMENTS = "--jobs {jobs} --report elsewhere/v.html --json"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What `make verify QUICK=--quick` prints and writes, as JSON and with a report besides."""
    made = subprocess.run(
        [str(shutil.which("make")), "--dry-run", "verify", "QUICK=--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = (line for line in made.stdout.splitlines() if " verify " in line)
    assert shlex.split(line)[1:] == shlex.split("verify --out out/verify --quick")
    folder = tmp_path_factory.mktemp("here")
    (folder / "work").mkdir()
    place = Place(folder, {"PYTHONPATH": str(ROOT)}, {"jobs": "1"}, str(folder / "cache"))
    return place.run("co2analysis verify", f"--out v --quick {_ARGUMENTS}")


@pytest.fixture(scope="module")
def folder(here: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of that protocol."""
    place = tmp_path_factory.mktemp("verify")
    fill(place, here)
    return place / "v"


def fill(place: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder."""
    for name, content in files.items():
        if name != "stdout":
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)


@pytest.fixture(scope="module")
def cells(folder: Path) -> list[Cell]:
    """The cells of that folder: all of them are there."""
    seen: list[tuple[int, int]] = []
    kept = store.measure(
        folder / "cells",
        quick=True,
        jobs=1,
        progress=lambda done, whole: seen.append((done, whole)),
    )
    assert seen == [(len(kept), len(kept))]
    return kept


@pytest.fixture(scope="module")
def findings(cells: list[Cell]) -> Findings:
    """What these cells say."""
    return checks.judge(cells, quick=True)


def refuse_constant(name: str) -> None:
    """NaN and Infinity are no JSON."""
    raise AssertionError(f"{name} in JSON")


def test_quick_protocol_holds(folder: Path) -> None:
    """No violation on thousands of configurations, a tight family, and every other check."""
    results = json.loads((folder / "results.json").read_bytes(), parse_constant=refuse_constant)
    assert results["passed"]
    assert results["quick"]
    grid = results["grid"]
    assert grid["violations"] == 0
    assert grid["configurations"] >= checks.LEAST_CONFIGURATIONS
    assert grid["configurations"] < grid["settings"]
    assert all(grid["noticed"][name]["begins"] > 0.5 for name in bound.TERMS)
    assert max(line["largest"] for line in grid["by_family"].values()) > checks.TIGHT
    assert all(check["passed"] for check in results["checks"])
    significant = {line["family"] for line in results["rates"]["fits"] if line["significant"]}
    assert significant == {"two kinds"}
    lost = {
        (part["delay"], line["rule"])
        for part in results["isolation"]["rescue"]
        for line in part["lines"]
        if line["lost"] and line["load"] > 1
    }
    assert (1, "neither") in lost
    assert (1, "penalty 4") not in lost
    assert (0, "neither") not in lost


def test_cells_and_report_are_the_same_elsewhere(here: dict[str, bytes], tmp_path: Path) -> None:
    """With another hash seed, time zone, engine, home and folder, and with more processes.

    One cell in eight is measured there; the others are already there.
    """
    around = os.pathsep.join([str(ROOT / "tests" / "elsewhere"), str(ROOT)])
    away = {"PYTHONHASHSEED": "2", "TZ": "Etc/GMT-14", "LC_ALL": "C.UTF-8", "PYTHONPATH": around}
    there = Place(tmp_path / "far", away, {"jobs": "2"}, str(tmp_path / "cache"), columns="61")
    cells = [name for name in here if name.startswith("v/cells/")]
    fill(there.work, {name: here[name] for at, name in enumerate(cells) if at % 8})
    other = there.run("co2analysis verify", f"--out v --quick {_ARGUMENTS}")
    assert list(here) == list(other)
    assert [name for name in here if here[name] != other[name]] == []


def test_cells_come_back_as_they_were(folder: Path, findings: Findings) -> None:
    """What is judged from kept cells is what the run that measured them wrote, to the last bit."""
    written = json.loads((folder / "results.json").read_bytes())
    assert json.loads(json.dumps(findings.to_dict())) == written


def test_report_has_its_figures(folder: Path) -> None:
    """Markdown refers to pictures that are there; HTML holds them, captioned and in words."""
    page = (folder / "report.md").read_text()
    whole = (folder / "report.html").read_text()
    for name in ("bound.png", "rates.png", "rescue.png", "oracle.png"):
        assert f"]({name})" in page
        content = (folder / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert f'src="data:image/png;base64,{base64.b64encode(content).decode()}"' in whole
    assert whole.count("<img ") == 4
    assert all(len(text) > 60 for text in re.findall(r'<img alt="([^"]*)"', whole))
    assert "<p>Scores of simulated means, and edges of stability</p></figcaption>" in whole
    assert "Everything holds." in page
    assert "Everything holds." in whole


def test_the_page_leads_with_the_answer_and_holds_the_numbers(
    folder: Path, findings: Findings
) -> None:
    """One heading, the findings in it; sections below; the file of numbers; no script at all."""
    whole = (folder / "report.html").read_text()
    (heading,) = re.findall(r"<h1>(.*?)</h1>", whole)
    grid = findings.grid
    assert f"All {len(findings.checks)} checks" in heading
    assert f"{grid.violations} violations on {grid.configurations:,} distinct" in heading
    assert f"is {grid.worst[0].ratio:.2f} of its bound" in heading
    levels = [int(level) for level in re.findall(r"<h([1-6])", whole)]
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert "script-src &#39;none&#39;" in whole
    assert "<script" not in whole
    (numbers,) = re.findall(r'download="results.json" href="data:[^;]+;base64,([^"]+)"', whole)
    assert base64.b64decode(numbers) == (folder / "results.json").read_bytes()
    assert (folder.parent / "elsewhere" / "v.html").read_text() == whole


def test_the_page_is_good_in_a_browser(folder: Path) -> None:
    """No error, no request, no script; readable at 360 px, in light and dark; axe has nothing."""
    from browsing import AXE, CHROMIUM, PHONE, Opened, chromium  # noqa: PLC0415 - it may skip

    if not CHROMIUM:
        pytest.skip("no Chromium: apt-get install chromium-headless-shell")
    path = folder / "report.html"
    with chromium() as browser:
        for scheme in ("light", "dark"):
            opened = Opened(
                browser, path, color_scheme=scheme, viewport=PHONE, bypass_csp=bool(AXE)
            )
            assert opened.said == []
            assert opened.requests() == [path.as_uri()]
            assert opened.page.evaluate("document.documentElement.scrollWidth") <= 360
            assert opened.page.pdf().startswith(b"%PDF")
            assert not AXE or opened.violations() == []


def test_report_shows_what_was_measured(folder: Path, findings: Findings) -> None:
    """Every row of every table has as many cells as its head, and figures are the findings'."""
    page = (folder / "report.md").read_text()
    tables = re.findall(r"(?:^\|.*\n)+", page, flags=re.MULTILINE)
    assert len(tables) >= 15
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table
    assert f"{findings.grid.configurations:,} distinct configurations" in page.replace("\n", " ")
    group = findings.grid.by_family["hill"]
    line = f"| hill | {group.configurations} | 0 | {group.median:.3f} | {group.largest:.3f} | 8 |"
    assert line in page
    assert (folder / "report.html").read_text().count("<table>") == len(tables)


def test_tables_cannot_be_broken() -> None:
    """A bar stays in its cell."""
    table = f"{report.columns('|a|', ['b'])}\n{report.row('x<y', ['c|d'])}\n"
    assert table == "| \\|a\\| | b |\n| --- | --- |\n| x<y | c\\|d |\n"
    page = markdown.to_html(table)
    assert "<th>|a|</th>" in page
    assert "<td>x&lt;y</td>" in page
    assert "<td>c|d</td>" in page


def without(name: str, factor: float) -> Callable[[Setting], Bound | Infeasible]:
    """The bound with one term multiplied by a factor."""

    def wrong(setting: Setting) -> Bound | Infeasible:
        terms = bound.evaluate(setting)
        if isinstance(terms, Infeasible):
            return terms
        return replace(terms, **{name: factor * getattr(terms, name)})

    return wrong


def grid_check(cells: list[Cell], evaluate: Callable[[Setting], Bound | Infeasible]) -> Check:
    """The check that the bound holds on the grid, with another bound in its place."""
    grids = (cell for cell in cells if isinstance(cell, GridCell) and not cell.task.late_steps)
    rows = [row for cell in grids for row in cell.rows(evaluate)]
    return next(checks.grid_checks(tightness.summary(rows)))


@pytest.mark.parametrize("factor", [0.0, 0.5])
@pytest.mark.parametrize("name", bound.TERMS)
def test_wrong_terms_are_noticed(cells: list[Cell], name: str, factor: float) -> None:
    """With any one term missing or halved there are violations."""
    check = grid_check(cells, without(name, factor))
    assert "no violation" in check.claim
    assert not check.passed
    assert not check.measured.startswith("0 violations")


def test_a_wrong_condition_is_noticed(cells: list[Cell], monkeypatch: pytest.MonkeyPatch) -> None:
    """With half of C the theorem would speak of runs that exceed it: measured/bound as published.

    The values are those of docs/theory.md, corrections, for delays 2, 4 and 16.
    """
    right = bound.gap_constants

    def halved(setting: Setting) -> tuple[float, float]:
        by_gradients, by_noise = right(setting)
        return by_gradients / 2, by_noise

    rounds_late = (c for c in cells if isinstance(c, GridCell) and not c.task.late_steps)
    beyond = [c for c in rounds_late if c.task.inner_step is not None]
    assert all(isinstance(row.bound, Infeasible) for cell in beyond for row in cell.rows())
    with monkeypatch.context() as patched:
        patched.setattr(bound, "gap_constants", halved)
        rows = [row for cell in beyond for row in cell.rows()]
        assert all(row.violated for row in rows)
        assert {row.delay: row.ratio for row in rows} == pytest.approx(
            {2: 1.023, 4: 1.046, 16: 1.073}, abs=1e-3
        )
        assert not grid_check(cells, bound.evaluate).passed
    condition = [c for c in checks.judge(cells, quick=True).checks if "half of C" in c.claim]
    assert [check.passed for check in condition] == [True]


def test_failure_ends_with_exit_code_1(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A wrong bound is reported with its violations, in files and as JSON."""
    shutil.copytree(folder / "cells", tmp_path / "cells")
    right = bound.evaluate

    def wrong(setting: Setting, condition: float = 1.0) -> Bound | Infeasible:
        terms = right(setting, condition)
        return terms if isinstance(terms, Infeasible) else replace(terms, optimization=0.0)

    monkeypatch.setattr(bound, "evaluate", wrong)
    with pytest.raises(typer.Exit) as ended:
        convergence.verify(out=tmp_path, quick=True, jobs=1, json_=True)
    assert ended.value.exit_code == 1
    results = json.loads(capsys.readouterr().out, parse_constant=refuse_constant)
    assert not results["passed"]
    assert results["grid"]["violations"] > 0
    whole = (tmp_path / "report.html").read_text()
    assert re.search(r"<h1>\d+ of the \d+ checks of CO2&#39;s convergence bound fail: ", whole)
    assert '<p class="doubt">FAILS: no violation of the bound' in whole
    page = (tmp_path / "report.md").read_text()
    assert "### Violations" in page
    assert "NOT everything holds" in page


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"configurations": 2999}, "no violation"),
        ({"violations": 1}, "no violation"),
        ({"beyond": ()}, "half of C"),
    ],
)
def test_too_little_evidence_about_the_bound_is_none(
    findings: Findings, change: dict[str, object], part: str
) -> None:
    """Fewer configurations than the claim says, or no run beyond the condition: it fails."""
    assert all(check.passed for check in checks.grid_checks(findings.grid))
    changed = replace(findings.grid, **change)  # type: ignore[arg-type]
    failed = [check.claim for check in checks.grid_checks(changed) if not check.passed]
    assert len(failed) == 1
    assert part in failed[0]


def test_a_grid_that_cannot_fail_is_no_evidence(findings: Findings) -> None:
    """One term that could be wrong by one of the factors is enough for the check to fail."""
    for name in bound.TERMS:
        for factor in findings.grid.noticed[name].violations:
            part = findings.grid.noticed[name]
            blind = replace(part, violations={**part.violations, factor: 0})
            grid = replace(findings.grid, noticed={**findings.grid.noticed, name: blind})
            failed = [check.claim for check in checks.grid_checks(grid) if not check.passed]
            assert [claim for claim in failed if "the grid can fail" in claim] == failed
            assert len(failed) == 1


def test_too_little_evidence_about_other_claims_is_none(findings: Findings) -> None:
    """Without fits, simulated settings or edges these claims fail; nothing holds of nothing."""
    assert all(check.passed for check in checks.rate_checks(findings.rates))
    empty = replace(findings.rates, agreement=(), fits=())
    assert [check.passed for check in checks.rate_checks(empty)] == [False, False]
    disagreeing = replace(findings.rates.agreement[0], agree=False)
    mixed = replace(findings.rates, agreement=(*findings.rates.agreement, disagreeing))
    assert [check.passed for check in checks.rate_checks(mixed)] == [False, True]
    few = replace(findings.oracle, configurations=29, edges=findings.oracle.edges[:19])
    assert [check.passed for check in checks.oracle_checks(few)] == [True, False, False]


def test_interrupted_protocol_goes_on(folder: Path, cells: list[Cell]) -> None:
    """Only cells that are missing are measured, and they come out the same."""
    place = folder / "cells"
    lost = min(place.glob("moments-*.json"), key=lambda path: path.stat().st_size)
    before = lost.read_bytes()
    lost.unlink()
    seen: list[tuple[int, int]] = []
    again = store.measure(
        place, quick=True, jobs=1, progress=lambda done, whole: seen.append((done, whole))
    )
    whole = seen[0][1]
    assert seen == [(whole - 1, whole), (whole, whole)]
    assert lost.read_bytes() == before
    assert again == cells
