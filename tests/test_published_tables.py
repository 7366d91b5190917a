"""`co2analysis validate --cells` and `--data`: what is read, and what is refused in one line."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.cli import main
from analysis.published.csv_tables import from_csv, marked
from analysis.published.paper_cells import from_papers
from analysis.published.papers import DATA_VARIABLE, tables_elsewhere
from analysis.published.predict import predict
from co2sim.errors import CatalogError

ZEROPP = """model_params_b,tokens_per_gpu,ib_links_100gbps_per_node,\
zero3_tflops_per_gpu,zeropp_tflops_per_gpu
18,1024,1,14,31
138,2048,4,,50
"""
CO2 = """method,network,tau,gpus,words_per_s,scalability_16_to_128,note
adamw_zero2,80 Gbit/s TCP/IP,,16,3488,,
co2_zero2,80 Gbit/s TCP/IP,48,128,304736,1.06,
co2_zero2,80 Gbit/s TCP/IP,12,128,,0.86,
"""
TIMES = """set,gpus,global_batch,micro_batch,hidden,heads,layers,seq_len,iteration_ms
single,2,8,1,512,8,4,1024,50.0
single,8,64,2,512,8,6,1024,70.0
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run `co2analysis` in an empty folder; gives exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["co2analysis", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


def written(tmp_path: Path, text: str) -> Path:
    """A CSV file."""
    path = tmp_path / "cells.csv"
    path.write_text(text)
    return path


@pytest.mark.slow
def test_rows_without_a_published_number_are_named(cli: Run, tmp_path: Path) -> None:
    """They are left out, with a line that says so."""
    text = CO2 + "co2_zero2,80 Gbit/s TCP/IP,24,64,,,\n"
    code, out, errors = cli("validate", "--brief", "--cells", str(written(tmp_path, text)))
    assert code == 0
    first, *progress = errors.splitlines()
    assert first == f"{tmp_path / 'cells.csv'}, line 5: no published number, left out"
    assert all(" done after " in line for line in progress)  # on a slow machine
    assert "tau=12" in out


@pytest.mark.parametrize(("text", "count"), [(ZEROPP, 3), (CO2, 4), (TIMES, 2)])
def test_a_table_in_each_format_is_read_and_predicted(
    tmp_path: Path, text: str, count: int
) -> None:
    """Every number of a row that is given is a cell; all have finite, positive predictions."""
    cells = from_csv(written(tmp_path, text), "check")
    assert len(cells) == count
    assert len({cell.name for cell in cells}) == count
    for cell in cells:
        assert 0 < predict(cell) < math.inf


def test_a_row_of_a_table_is_the_cell_of_the_paper(tmp_path: Path) -> None:
    """What `--cells` predicts for a published row is what is predicted for the paper's cell."""
    known = {cell.name: cell for cell in from_papers()}
    cells = from_csv(written(tmp_path, ZEROPP), "check")
    same = [cell for cell in cells if cell.name in known]
    assert len(same) == 2
    for cell in same:
        assert cell.terms == known[cell.name].terms
        assert cell.published == known[cell.name].published


def test_a_row_that_was_fitted_on_is_no_check(tmp_path: Path) -> None:
    """Whatever number it states, a configuration that is marked fit in papers stays fit."""
    known = from_papers()
    zeropp = marked(from_csv(written(tmp_path, ZEROPP.replace(",31", ",32")), "check"), known)
    assert [cell.use for cell in zeropp] == ["fit", "fit", "check"]
    co2 = marked(from_csv(written(tmp_path, CO2), "check"), known)
    assert [cell.use for cell in co2] == ["fit", "check", "check", "check"]


def test_blank_lines_comments_and_short_rows_are_no_obstacle(tmp_path: Path) -> None:
    """Fields that are left out at the end of a row are empty."""
    text = "\ufeff# a table\n\n" + CO2.replace("304736,1.06,", "304736")
    assert len(from_csv(written(tmp_path, text), "check")) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", "no known table"),
        ("", "no rows"),
        (ZEROPP.partition("\n")[0] + "\n", "no rows"),
        (ZEROPP.replace("14,31", ",").replace(",,50", ",,"), "no published number"),
        (ZEROPP.replace("zero3_tflops_per_gpu", "zero3"), "no column zero3_tflops_per_gpu"),
        (CO2.replace("network", "net"), "no column network"),
        (TIMES.replace("heads", "head"), "no column heads"),
        (
            ZEROPP.replace("18,1024", "18,many"),
            "line 2: tokens_per_gpu is 'many'; it must be a whole number from 1 to 999999999",
        ),
        (
            ZEROPP.replace("18,1024", "17,1024"),
            "line 2: model_params_b is '17'; it must be one of 18, 49, 91, 138",
        ),
        (
            ZEROPP.replace("1024,1,", "1024,9,"),
            "line 2: ib_links_100gbps_per_node is '9'; it must be at most 8, the links of a DGX-2",
        ),
        (ZEROPP.replace("14,31", "14,31,7"), "line 2: 6 fields under 5 columns"),
        *((ZEROPP.replace("18,1024", f"18,{n}"), "line 2") for n in ("256", "1000", "0", "-512")),
        *(
            (ZEROPP.replace("14,31", f"{n},31"), "above 0")
            for n in ("0", "-1", "nan", "inf", "x", "1_4", "1e-300", "1e300")
        ),
        (ZEROPP.replace("model_params_b", "tokens_per_gpu"), "column tokens_per_gpu twice"),
        (CO2.replace("IP,48", "IP,99999"), "line 3: co2: tau is 99999"),
        (TIMES.replace("2,8,1", "2,80000,1"), "line 2: accumulation is 40000"),
        (
            CO2.replace("adamw_zero2", "adamw"),
            "line 2: method is 'adamw'; it must be one of adamw_zero2, co2_zero2",
        ),
        (
            CO2.replace("zero2,80 Gbit/s TCP/IP", "zero2,800 Gbit/s RoCE"),
            "line 2: network is '800 Gbit/s RoCE'; it must be one of 80 Gbit/s TCP/IP",
        ),
        (CO2.replace("IP,48", "IP,"), "line 3: tau is ''"),
        (CO2.replace("IP,48", "IP,1.5"), "line 3: tau is '1.5'"),
        (CO2.replace("IP,,16", "IP,4,16"), "line 2: tau is '4', but adamw_zero2 has none"),
        (CO2.replace("48,128", "48,64"), "line 3: scalability_16_to_128 on 64 GPUs"),
        (CO2.replace(",16,3488", ",0,3488"), "line 2: gpus is '0'"),
        (CO2.replace(",16,3488", ",12,3488"), "line 2: 12 GPUs do not fill"),
        (TIMES.replace("2,8,1", "2,7,1"), "line 2: global_batch 7 is not a multiple"),
        (TIMES.replace("2,8,1", "0,8,1"), "line 2: gpus is '0'"),
        (TIMES.replace("8,64,2", "16,64,2"), "line 3: 16 GPUs; these runs are of one node"),
        (TIMES.replace("512,8,4", "512,7,4"), "line 2"),
        (TIMES.replace("1024,50.0", "1024,nan"), "line 2: iteration_ms is 'nan'"),
        *(
            (TIMES.replace("2,8,1", f"{'9' * digits},8,1"), "it must be a whole number from 1 to")
            for digits in (10, 5000)
        ),
        (TIMES.replace("single,2", '"single,2'), "cannot read"),
        *(
            (f"{text}# again\n{text.splitlines()[1]}\n", f"line {last}: it says the same as line 2")
            for text, last in ((ZEROPP, 5), (CO2, 6), (TIMES, 5))
        ),
    ],
)
def test_a_table_that_cannot_be_read_is_refused(tmp_path: Path, text: str, words: str) -> None:
    """The error says what is wrong, what was given and what is allowed, with file and line."""
    with pytest.raises(CatalogError) as caught:
        from_csv(written(tmp_path, text), "check")
    assert words in str(caught.value)
    assert "cells.csv" in str(caught.value)
    assert len(str(caught.value)) < 600


def test_files_that_are_none_end_with_one_line(cli: Run, tmp_path: Path) -> None:
    """A file that does not exist, a folder, and one that is binary."""
    (tmp_path / "binary.csv").write_bytes(bytes(range(256)))
    for name, words in (
        ("nowhere.csv", "No such file"),
        (".", "Is a directory"),
        ("binary.csv", "not a text in UTF-8"),
    ):
        code, out, err = cli("validate", "--cells", name)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert words in err


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_predicted(
    cli: Run, tmp_path: Path
) -> None:
    """A report below a file, and figures there: one line each."""
    (tmp_path / "file").touch()
    for asked in (("--markdown", "file/r.md"), ("--figures", "file/x")):
        code, out, err = cli("validate", *asked[:1], str(tmp_path / asked[1]))
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "cannot write into" in err


def test_data_must_be_the_table_that_is_referred_to(cli: Run, tmp_path: Path) -> None:
    """`--data` with another table would count its rows as fitted on: it is refused."""
    path = written(tmp_path, ZEROPP)
    code, out, err = cli("validate", "--data", str(path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "not a table of vtrain: it has no column gpus" in err


@pytest.mark.slow
def test_without_the_iteration_times_one_line_says_so(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stderr, where it matters: with rows of that table, else for the published cells."""
    monkeypatch.setattr("analysis.published.csv_tables.tables_elsewhere", lambda _data: [])
    code, out, err = cli("validate", "--cells", str(written(tmp_path, TIMES)), "--json")
    assert (code, err.count("--data names its folder")) == (0, 1)  # a slow machine tells how far
    assert [row["use"] for row in json.loads(out)] == ["check", "check"]
    code, out, err = cli("validate", "--cells", str(written(tmp_path, CO2)), "--json")
    assert (code, "--data" in err) == (0, False)


def test_the_variable_names_the_folder_of_the_iteration_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CO2SIM_DATA is a folder that holds the table; without it, it is an error that names it."""
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    with pytest.raises(CatalogError, match=DATA_VARIABLE):
        tables_elsewhere()
    path = tmp_path / "a100_dp_iteration_times.csv"
    path.write_text(TIMES)
    assert tables_elsewhere() == [path]


def test_help_names_no_folder_of_this_machine(cli: Run) -> None:
    """Defaults are said in words."""
    code, out, _ = cli("validate", "--help")
    assert code == 0
    assert str(Path(__file__).parent.parent) not in "".join(out.split())
    assert "site-packages" not in out
