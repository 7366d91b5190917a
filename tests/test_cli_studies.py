"""`co2sim scale` and `sweep`: what they print and write."""

import csv
import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from co2sim import simulate, study
from co2sim.case import Case
from co2sim.cli import scaling
from co2sim.errors import OptionError
from co2sim.files import write_atomically
from co2sim.published_cells import ThroughputCell
from co2sim.published_speeds import SpeedComparison
from co2sim.report.scaling_figure import chart
from co2sim.units import figures

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parent.parent
SMALL = ("-c", "dgx-h100", "-m", "gpt2-small", "-g", "16")


@pytest.mark.slow
def test_scale_writes_table_and_figures_and_shows_published_cells(cli: Run, tmp_path: Path) -> None:
    """`scale` prints a table, writes CSV, PNG and SVG, and shows published cells with errors."""
    code, out, _ = cli(
        *("scale", "-c", "a100-tcp80", "-m", "transnormer-7b", "-s", "zero2", "-g", "8,16,128"),
        *("--published", str(ROOT / "papers/co2/results.toml"), "--out", "deep/out"),
    )
    assert code == 0
    folder = tmp_path / "deep/out"
    assert sorted(path.name for path in folder.iterdir()) == ["scale.csv", "scale.png", "scale.svg"]
    rows = list(csv.DictReader((folder / "scale.csv").read_text().splitlines()))
    assert [row["gpus"] for row in rows] == ["8", "16", "128"]
    assert (folder / "scale.png").read_bytes().startswith(b"\x89PNG")
    drawn = (folder / "scale.svg").read_text()
    assert "<svg" in drawn
    assert "stars are published" in drawn
    assert "18,444" in out
    predicted = float(rows[0]["tokens_per_s"])
    assert f"{predicted / 18444 - 1:+.0%}" in out


def test_without_altair_scale_has_no_picture(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes the table, and names the extra."""
    monkeypatch.setattr(scaling, "installed", lambda: False)
    code, out, _ = cli("scale", *SMALL, "-s", "ddp")
    assert code == 0
    assert "co2sim[report]" in out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["scale.csv"]


def test_the_picture_shows_intervals_published_cells_and_what_does_not_fit() -> None:
    """Per GPU, a panel for each cluster, one colour a strategy; a star at the published size."""
    cases = [
        Case(cluster=name, model="gpt2-small", strategy=how, gpus=gpus)
        for name in ("a100-tcp80", "a100-roce800")
        for how in ("ddp", "zero3")
        for gpus in (8, 64)
    ]
    results = [study.run(case) for case in cases]
    results[0] = replace(results[0], fits_in_memory=False)
    cell = ThroughputCell(
        where="table 1", quantity="tokens_per_s", value=32000.0, use="check",
        cluster="a100-tcp80", model="m", strategy="ddp", gpus=32,
    )  # fmt: skip
    spec = chart(cases, results, [SpeedComparison(cell, "ddp", 1.0)], "").to_dict()
    first, second = spec["hconcat"]
    marks = [layer["mark"]["type"] for layer in first["layer"]]
    assert marks == ["area", "line", "point", "point", "point"]
    band, line, fits, hollow, star = (
        spec["datasets"][layer["data"]["name"]] for layer in first["layer"]
    )
    assert [row["value"] for row in line] == [r.tokens_per_s_per_gpu for r in results[:4]]
    assert ([row["gpus"] for row in fits], [row["gpus"] for row in hollow]) == ([64, 8, 64], [8])
    assert star == [{"strategy": "ddp", "gpus": 32, "value": 1000.0}]
    assert first["layer"][-1]["encoding"]["x"]["axis"]["values"] == [8, 32, 64]
    assert band[1]["low"] < band[1]["value"] < band[1]["high"]
    assert band[1]["low"] * 64 == pytest.approx(results[1].tokens_per_s_low)
    assert len(second["layer"]) == 3


@pytest.mark.slow
def test_scale_compares_the_largest_size_with_the_smallest(cli: Run) -> None:
    """Throughput per GPU, the largest relative to the smallest; of two sizes once."""
    _, out, _ = cli("scale", *SMALL[:4], "-s", "ddp", "-g", "8,16")
    small, large = (
        simulate(SMALL[1], SMALL[3], "ddp", gpus=gpus).tokens_per_s_per_gpu for gpus in (8, 16)
    )
    assert "8->16" in out
    assert "16->16" not in out
    (row,) = [line.split() for line in out.splitlines() if line.startswith("ddp ")]
    assert row[1:3] == [f"{small:,.0f}", f"{large:,.0f}"]
    assert f"{large / small:.2f}" in row


@pytest.mark.slow
def test_every_note_names_its_rows(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of published cells ends with the number of its note; the notes follow, each once."""
    monkeypatch.setenv("COLUMNS", "160")
    file = ROOT / "papers/co2/results.toml"
    _, out, _ = cli(
        *("scale", "-c", "a100-tcp80", "-m", "transnormer-7b", "-s", "zero2", "-g", "8,16,128"),
        *("--published", str(file)),
    )
    table, _, below = out.partition("published and predicted\n")[2].partition("\n\n")
    assert table.splitlines()[0].split()[-2:] == ["use", "note"]
    notes = dict(re.findall(r"^note (\d+): (.*?) *$", below, re.MULTILINE))
    cells = tomllib.loads(file.read_text())["cell"]
    for row in table.splitlines()[1:]:
        meant = [c for c in cells if f"  {figures(c['value'])}  " in row and c["use"] in row]
        assert [notes[row.split()[-1]]] == [cell["note"] for cell in meant]
    assert len(table.splitlines()) == 1 + 7
    assert len(set(notes.values())) == len(notes) == 5


def test_scale_json_holds_results_and_comparisons(cli: Run) -> None:
    """`scale --json` holds every result, and signed errors of the published cells."""
    code, out, _ = cli(
        *("scale", "-c", "a100-tcp80", "-m", "transnormer-7b", "-s", "zero2", "-g", "16,128"),
        *("--published", str(ROOT / "papers/co2/results.toml"), "--json"),
    )
    found = json.loads(out)
    assert code == 0
    assert [result["gpus"] for result in found["results"]] == [16, 128]
    first, last = (result["tokens_per_s_per_gpu"] for result in found["results"])
    ratio = next(c for c in found["published"] if c["quantity"] == "scalability_ratio")
    assert ratio["predicted"] == pytest.approx(last / first)
    assert ratio["error"] == pytest.approx(last / first / 0.82 - 1)


@pytest.mark.slow
def test_no_name_stands_twice_in_an_object_of_json(cli: Run) -> None:
    """Readers of JSON differ in what they make of a name that stands twice: there is none."""

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = [name for name, _ in pairs]
        assert len(set(names)) == len(names) > 0
        return dict(pairs)

    for command in (
        ("run", "-g", "16", "-s", "co2"),
        ("scale", "-g", "8,16", "-s", "ddp", "-s", "co2"),
        ("sweep", "-s", "co2", "--vary", "gpus=8,16", "--vary", "strategy.tau=1,2", "--jobs", "1"),
    ):
        code, out, _ = cli(*command, *SMALL[:4], "--json")
        assert code == 0
        assert json.loads(out, object_pairs_hook=once)


def test_every_published_cell_of_the_study_is_predicted(cli: Run) -> None:
    """Cells of strategies and sizes that the study leaves out are simulated for the comparison."""
    code, out, _ = cli(
        *("scale", "-c", "a100-tcp80", "-m", "transnormer-7b", "-s", "ddp", "-g", "8", "--json"),
        *("--published", str(ROOT / "papers/co2/results.toml")),
    )
    found = json.loads(out)
    assert code == 0
    assert [result["strategy"] for result in found["results"]] == ["ddp"]
    cells = {(c["strategy"], *c["sizes"]) for c in found["published"]}
    assert ("co2(tau=12, worker=node, inner=zero2)", 16, 128) in cells
    assert len(cells) == 7


@pytest.mark.slow
def test_sweep_takes_all_combinations_in_parallel(cli: Run, tmp_path: Path) -> None:
    """Two axes of two values give four rows in order, the same on one process and on two."""
    arguments = ("sweep", *SMALL, "-s", "co2", "--vary", "strategy.tau=1,4")
    arguments += ("--vary", "inter.bandwidth=1 Gbit/s, 10 Gbit/s", "--csv", "sweep.csv", "--json")
    code, out, _ = cli(*arguments, "--jobs", "2")
    assert code == 0
    found = json.loads(out)
    assert [tuple(row["setting"].values()) for row in found] == [
        ("1", "1 Gbit/s"),
        ("1", "10 Gbit/s"),
        ("4", "1 Gbit/s"),
        ("4", "10 Gbit/s"),
    ]
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == 5
    assert json.loads(cli(*arguments, "--jobs", "1")[1]) == found


def test_sweep_over_strategies_keeps_commas_in_parentheses(cli: Run) -> None:
    """A strategy with options is one value."""
    strategies = "ddp, co2(tau=4, worker=node), zero3"
    code, out, _ = cli("sweep", *SMALL, "--vary", f"strategy={strategies}", "--json", "--jobs", "1")
    assert code == 0
    names = [row["strategy"] for row in json.loads(out)]
    assert names == ["ddp", "co2(tau=4, worker=node)", "zero3"]


def test_sweep_takes_what_varies_instead_of_what_is_given(cli: Run) -> None:
    """A cluster, a model or strategies; both or neither are refused."""
    values = {"cluster": "a100-tcp80", "model": "gpt2-small", "strategy": "ddp"}
    for name, value in values.items():
        others = [word for key in values.keys() - {name} for word in (f"--{key}", values[key])]
        command = ("sweep", "--gpus", "16", "--json", "--jobs", "1", *others)
        varied = ("--vary", f"{name}={value}")
        assert cli(*command, *varied)[0] == 0
        code, _, err = cli(*command, *varied, f"--{name}", value)
        assert code == 2
        assert f"--vary {name}" in err
        code, _, err = cli(*command, "--vary", "micro_batch=1,2")
        assert code == 2
        assert f"--{name} is missing" in err


def test_sweep_heads_its_table_with_what_all_rows_share(cli: Run) -> None:
    """Clusters that differ by what varies only are named by their key."""
    varied = ("--vary", "inter.bandwidth=1 Gbit/s, 10 Gbit/s", "--jobs", "1")
    code, out, _ = cli("sweep", *SMALL, "-s", "ddp", *varied)
    assert code == 0
    model, cluster = SMALL[SMALL.index("-m") + 1], SMALL[SMALL.index("-c") + 1]
    assert out.startswith(f"{model} on {cluster}, ddp, 16 GPUs, by inter.bandwidth\n")
    assert "none fits" not in out


def test_the_title_of_a_sweep_holds_for_cases_that_failed_too(cli: Run) -> None:
    """12 GPUs do not fill nodes: the title does not say that all rows have 8."""
    asked = ("sweep", "-c", "a100-tcp80", "-m", "gpt2-small", "-s", "co2", "--jobs", "1")
    code, out, _ = cli(*asked, "--vary", "gpus=8,12")
    assert code == 1
    title = out.partition("\n")[0]
    assert title.endswith("80 Gbit/s TCP/IP, co2(tau=12), by gpus")
    _, out, _ = cli(*asked, "-g", "16", "--vary", "gpus_per_node=8,5")
    shared = "gpt2-small on a100-tcp80, co2(tau=12), 16 GPUs"
    assert out.startswith(f"{shared}, by gpus_per_node\n")
    assert "\n\nassumed" in out


NOISE = ("--node-speed", "0=0.5", "--straggle", "0.2", "--jitter", "0.05", "--rounds", "2")


@pytest.mark.slow
def test_studies_say_what_makes_ranks_differ(cli: Run, tmp_path: Path) -> None:
    """Speeds of nodes, stragglers and jitter head the table and the figure, as they do in `run`."""
    asked = ("-c", "a100-tcp80", "-m", "gpt2-small", "-s", "ddp", *NOISE, "--jobs", "1")
    words = "node 0 at 0.5 of nominal, straggle 0.2 on every node"
    _, out, _ = cli("scale", *asked, "-g", "8,16")
    said = f"{words} (seed 0), jitter 0.05 on every op (seed 0)"
    assert said in " ".join(out.split())
    drawn = re.sub(r"<.*?>", " ", (tmp_path / "out" / "scale.svg").read_text())
    assert said in " ".join(drawn.split())
    _, out, _ = cli("sweep", *asked, "-g", "16", "--vary", "seed=1,2")
    assert f"by seed; {words}, jitter 0.05 on every op" in " ".join(out.split())
    assert "every op (seed" not in " ".join(out.split())
    _, out, _ = cli("sweep", *asked[:6], "-g", "16", "--jitter", "0.1", "--vary", "micro_batch=1,2")
    assert "by micro_batch; jitter 0.1 on every op (seed 0)" in " ".join(out.split())


def test_sweep_marks_what_does_not_fit(cli: Run) -> None:
    """With a star and its note; where no row fits it says how to find what would."""
    case = ("sweep", "-c", "a100-tcp80", "-m", "llama-7b", "-g", "8", "--jobs", "1")
    _, out, _ = cli(*case, "-s", "ddp", "--vary", "micro_batch=1,2")
    assert "none fits" in out
    assert "`co2sim run`" in out
    _, out, _ = cli(*case, "--vary", "strategy=ddp, zero3")
    assert "* does not fit" in out
    assert "none fits" not in out
    _, out, _ = cli(*case, "-s", "zero3", "--vary", "seed=1,2")
    assert "does not fit" not in out


def test_sorted_rows_keep_their_settings(cli: Run) -> None:
    """The fastest first, each beside what was varied for it."""
    given = (*SMALL[:4], "-s", "ddp", "--vary", "gpus=8,24,16", "--jobs", "1", "--json")
    rows = json.loads(cli("sweep", *given, "--sort=-tokens_per_s")[1])
    assert [row["gpus"] for row in rows] == [24, 16, 8]
    assert all(row["setting"] == {"gpus": str(row["gpus"])} for row in rows)


def test_sweep_applies_strategies_before_their_options(cli: Run) -> None:
    """Axes may come in any order: options hold for each strategy, and together."""
    code, out, _ = cli(
        *("sweep", *SMALL, "--vary", "strategy.tau=4,8", "--json", "--jobs", "1"),
        *("--vary", "strategy=co2,slowmo", "--vary", "strategy.inner=zero1"),
        *("--vary", "strategy.worker=node"),
    )
    assert code == 0
    assert {row["strategy"] for row in json.loads(out)} == {
        f"{name}(tau={tau}, worker=node, inner=zero1)"
        for name in ("co2", "slowmo")
        for tau in (4, 8)
    }


def test_a_pipe_is_not_replaced_by_a_file(cli: Run, tmp_path: Path) -> None:
    """Output goes to regular files only, and through links to what they point to."""
    (tmp_path / "real.csv").write_text("old")
    (tmp_path / "link.csv").symlink_to(tmp_path / "real.csv")
    sweep = ("sweep", *SMALL, "-s", "ddp", "--vary", "micro_batch=1", "--csv")
    assert cli(*sweep, "link.csv")[0] == 0
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "real.csv").read_text() != "old"
    assert cli(*sweep, "/dev/null")[0] == 2
    assert Path("/dev/null").is_char_device()


def test_files_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    """When one of several files cannot be written, none is, and no draft stays behind."""
    (tmp_path / "taken").mkdir()
    with pytest.raises(OptionError, match="taken"):
        write_atomically({tmp_path / "a.csv": b"a", tmp_path / "taken": b"b"})
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
