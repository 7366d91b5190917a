"""`co2sim sweep --out`: a folder that grows and goes on where it was, and the keys of its cases."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest
import tiny
from commands import Command
from hypothesis import given
from hypothesis import strategies as st
from places import DATA

import co2sim
from co2sim import DDP, Noise, OptionError, PublishedCO2, Question, run, sweep_to
from co2sim.catalog import Contents
from co2sim.common.version import own_identity
from co2sim.studies import grid, results_folder
from co2sim.studies.grid import LazyGrid, Shard
from co2sim.studies.results_folder import FolderSummary, Inputs, SweepStopped

pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")

ASKED: dict[str, Any] = {
    "cluster": tiny.cluster(),
    "model": tiny.model(),
    "strategy": "ddp",
    "accumulation": 1,
    "recompute": "none",
}
VARY: dict[str, Any] = {"micro_batch": [1, 2, 3, 4], "strategy.bucket_mib": [1, 2]}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three rows, so that few cases make several."""
    monkeypatch.setattr(results_folder, "ROWS", 3)


def kept(folder: Path, vary: dict[str, Any] = VARY, **changes: Any) -> FolderSummary:
    """A sweep of eight cases."""
    return sweep_to(folder, **ASKED, vary=vary, **changes)


def files(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def read(folder: Path) -> pd.DataFrame:
    """All rows, by their place in the grid."""
    return pd.read_parquet(folder).sort_values("case").reset_index(drop=True)


def test_a_folder_holds_what_a_sweep_returns(tmp_path: Path) -> None:
    """Every column that both have is the same, row for row, the failed one included."""
    vary = {"gpus": [2, 3, 4], "strategy": ["ddp", "zeropp"]}
    asked = {name: value for name, value in ASKED.items() if name != "strategy"}
    asked["micro_batch"] = 1
    whole = co2sim.sweep(**asked, vary=vary, tokens=1e9)
    found = sweep_to(tmp_path, **asked, vary=vary, tokens=1e9)
    assert (found.cases, found.computed, found.reused, found.failed) == (6, 6, 0, 2)
    table = read(tmp_path)
    assert table["case"].tolist() == list(range(6))
    assert table["error"].notna().tolist() == [False, False, True, True, False, False]
    assert set(whole) <= set(table)
    for name in whole:
        ours, theirs = table[name].tolist(), whole[name].tolist()
        assert [None if pd.isna(v) else v for v in ours] == [
            None if pd.isna(v) else v for v in theirs
        ], name


def test_what_is_there_is_not_computed_again_and_what_changed_is(tmp_path: Path) -> None:
    """The same call finds all; another value of one path keeps the others, and drops its rows."""
    assert kept(tmp_path).summary() == {
        "out": str(tmp_path),
        "cases": 8,
        "computed": 8,
        "reused": 0,
        "failed": 0,
    }
    before = files(tmp_path)
    assert sorted(before) == [f"part-00000{number}.parquet" for number in range(3)]
    again = kept(tmp_path)
    assert (again.computed, again.reused) == (0, 8)
    assert files(tmp_path) == before
    more = {**VARY, "micro_batch": [1, 5, 2, 3]}
    changed = kept(tmp_path, more)
    assert (changed.computed, changed.reused) == (2, 6)
    fresh = tmp_path / "fresh"
    sweep_to(fresh, **ASKED, vary=more)
    assert files(fresh) == {n: c for n, c in files(tmp_path).items() if not n.startswith("fresh")}


def interrupted(after: int, error: type[BaseException]) -> Callable[..., Any]:
    """What computes figures, until it is stopped at a case."""
    done: list[object] = []
    compute = results_folder.figures

    def stop(*given: Any, **options: Any) -> Any:
        done.append(given)
        if len(done) > after:
            raise error
        return compute(*given, **options)

    return stop


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_stopped_sweep_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """The part that was under way is kept; in the end all bytes are those of one go."""
    kept(tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(results_folder, "figures", interrupted(5, error))
        with pytest.raises(BaseException) as stopped:  # noqa: PT011 - either
            kept(tmp_path / "out")
    if error is KeyboardInterrupt:
        assert isinstance(stopped.value, SweepStopped)
        assert str(stopped.value).startswith("5 of 8 cases are in ")
    assert len(read(tmp_path / "out")) == 5
    rest = kept(tmp_path / "out")
    assert (rest.computed, rest.reused) == (3, 5)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_a_point_without_a_case_is_a_row_with_its_reason(tmp_path: Path) -> None:
    """Ddp has no tau: with co2 it has; the others go on."""
    vary = {"strategy": ["co2", "ddp"], "strategy.tau": [1, 2]}
    with pytest.raises(OptionError, match="ddp has no option 'tau'"):
        sweep_to(tmp_path, tiny.cluster(), tiny.model(), vary=vary)
    points = LazyGrid(
        co2sim.Question(cluster=tiny.cluster(), model=tiny.model(), strategy=""), vary
    )
    found = results_folder.stream(results_folder.SweepTable(points, tmp_path), None)
    assert (found.computed, found.failed) == (4, 2)
    errors = read(tmp_path)["error"]
    assert errors.isna().tolist() == [True, True, False, False]
    assert "ddp has no option 'tau'" in errors[3]


@given(cases=st.integers(0, 3000), count=st.integers(1, 60))
def test_shards_partition_the_cases(cases: int, count: int) -> None:
    """Every case is in exactly one of them, and their sizes differ by one at most."""
    shards = [Shard(number, count).places(cases) for number in range(1, count + 1)]
    assert sorted(place for shard in shards for place in shard) == list(range(cases))
    sizes = {len(shard) for shard in shards}
    assert max(sizes) - min(sizes) <= 1


@given(st.data())
def test_points_are_the_settings_of_a_grid(data: st.DataObject) -> None:
    """In the same order, whatever the sizes of its axes."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    paths = ("micro_batch", "accumulation", "rounds", "seed")
    vary = {path: list(range(1, size + 1)) for path, size in zip(paths, sizes, strict=False)}
    points = LazyGrid(co2sim.Question(cluster="", model="", strategy=""), vary)
    assert [points.setting(place) for place in range(len(points))] == grid.settings(vary)


@pytest.mark.parametrize("shared", [True, False])
def test_shards_together_are_the_bytes_of_one_process(tmp_path: Path, *, shared: bool) -> None:
    """In one folder, or copied into one: the call without a shard computes nothing more."""
    kept(tmp_path / "whole")
    for number in (3, 1, 2):
        place = tmp_path / "out" if shared else tmp_path / str(number)
        part = kept(place, shard=f"{number}/3")
        assert part.computed == part.cases == (2 if number == 3 else 3)
        assert kept(place, shard=f"{number}/3").computed == 0
        if not shared:
            (tmp_path / "out").mkdir(exist_ok=True)
            for path in place.iterdir():
                path.rename(tmp_path / "out" / path.name)
    assert len(read(tmp_path / "out")) == 8
    assert kept(tmp_path / "out").computed == 0
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_a_folder_of_another_question_or_of_other_files_is_left_alone(tmp_path: Path) -> None:
    """It is refused in one line, and so is a part that somebody cut."""
    kept(tmp_path)
    before = files(tmp_path)
    with pytest.raises(OptionError, match="other columns"):
        kept(tmp_path, {"micro_batch": [1, 2]})
    assert files(tmp_path) == before
    (tmp_path / "part-000001.parquet").write_bytes(b"PAR1 cut")
    with pytest.raises(OptionError, match="part-000001"):
        kept(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="not a folder"):
        kept(tmp_path / "file")


ASK = ("sweep", "-c", "a100-tcp80", "-m", "gpt2-small", "-s", "ddp", "--jobs", "1")


def test_the_command_says_how_many(cli: Command) -> None:
    """In words or as JSON; a failed case is named on stderr, with exit code 1."""
    asked = ("--vary", "gpus=8,12,16", "--out", "kept")
    code, out, err = cli(*ASK, *asked)
    assert (code, out.split()[0]) == (1, "3")
    assert err.startswith("error: 1 of 3 cases failed: gpus=12: ")
    assert err.endswith(" kept\n")
    code, out, _ = cli(*ASK, *asked, "--json")
    assert code == 1
    assert json.loads(out) == {"out": "kept", "cases": 3, "computed": 1, "reused": 2, "failed": 1}


# --- keys of cases ----------------------------------------------------------------------------


CATALOG = Path(co2sim.__file__).parent / "catalog"
CONFIG = json.loads((DATA / "huggingface.json").read_text())["llama"]["config"]
CASE = Question(cluster="a100-tcp80", model="gpt2-small", strategy="co2.published:tau=2", gpus=16)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster that names a GPU and failures beside it, and a model in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    cluster = (CATALOG / "clusters" / "dgx-h100.toml").read_text()
    assert 'gpu = "h100"' in cluster
    shutil.copy(CATALOG / "gpus" / "h100.toml", tmp_path / "mine.toml")
    shutil.copy(CATALOG / "failures" / "meta-rsc-1.toml", tmp_path / "failing.toml")
    shutil.copy(CATALOG / "stacks" / "nanotron.toml", tmp_path / "stack.toml")
    named = cluster.replace('gpu = "h100"', 'gpu = "mine.toml"\nfailures = "failing.toml"')
    (tmp_path / "cluster.toml").write_text(named)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize("gpu", [None, "./other.toml", "a100-80"])
def test_an_inlined_case_gives_the_same_result_without_any_file(
    folder: Path, gpu: str | None
) -> None:
    """Names, facts, notes and figures are those of the files, which are gone by then."""
    shutil.copy(CATALOG / "gpus" / "h200.toml", folder / "other.toml")
    overrides = {"inter.bandwidth": "90 Gbit/s", "model.seq_len": "16"} | (
        {"gpu": gpu} if gpu else {}
    )
    case = Question(
        cluster="cluster.toml",
        model="model",
        strategy="ddp",
        gpus=16,
        overrides=overrides,
        stack="stack.toml",
    )
    expected = run(case)
    whole = Inputs().inlined(case)
    assert isinstance(whole.cluster, Contents)
    assert isinstance(whole.model, Contents)
    assert isinstance(whole.stack, Contents)
    assert whole.title == case.title
    shutil.rmtree(folder / "model")
    for path in folder.glob("*.toml"):
        path.unlink()
    assert run(whole) == expected
    assert run(whole) == expected  # what was read is not changed by a run


def test_a_key_changes_with_every_field_of_a_case_and_with_nothing_else() -> None:
    """Each field, changed alone, gives another key; how a value is written does not matter."""
    others: dict[str, Any] = {
        "cluster": "dgx-h100",
        "model": "gpt2-medium",
        "strategy": "co2.published:tau=3",
        "gpus": 8,
        "micro_batch": 2,
        "accumulation": 2,
        "global_batch": 64,
        "precision": "fp16",
        "attention": "eager",
        "recompute": "full",
        "checkpointing": "reentrant",
        "loss": "eager",
        "optimizer": "sgd",
        "offload": "optimizer",
        "stack": "torchtitan-eager",
        "overrides": {"inter.bandwidth": "9 Gbit/s"},
        "noise": Noise(jitter=0.1),
        "rounds": 3,
        "fold": False,
        "interval": "full",
        "tp": 2,
        "ep": 2,
        "cp": 2,
        "lora": 8,
        "quantize_base": "nf4",
        "sequence_parallel": True,
        "pp": 2,
        "interleave": 2,
        "schedule": "zbv",
        "etp": 2,
    }
    assert others.keys() == {field.name for field in fields(Question)}
    key = Inputs().key
    keys = {key(replace(CASE, **{name: value})) for name, value in others.items()}
    assert len(keys | {key(CASE)}) == len(others) + 1
    assert key(replace(CASE, strategy=PublishedCO2(tau=2))) == key(CASE)
    assert key(replace(CASE, strategy="co2.published(tau=2)", gpus="16")) == key(CASE)  # type: ignore[arg-type]
    assert Inputs(["tokens", 1e9]).key(CASE) != key(CASE)


def test_a_key_changes_with_what_stands_in_a_file_and_with_objects(folder: Path) -> None:
    """The file of the GPU beside that of the cluster counts, where it lies does not change."""
    case = replace(CASE, cluster="cluster.toml", stack="stack.toml")

    def key() -> str:
        inputs = Inputs()
        return inputs.key(inputs.inlined(case))

    before = key()
    assert key() == before
    gpu = folder / "mine.toml"
    gpu.write_text(gpu.read_text().replace("launch_overhead", "# \nlaunch_overhead"))
    assert key() == before  # a comment
    gpu.write_text(gpu.read_text() + '\n[idle]\nvalue = "1 W"\n')
    assert key() != before
    before, stack = key(), folder / "stack.toml"
    stack.write_text(stack.read_text() + "overlap = false\n")
    assert key() != before
    one, two = tiny.cluster(), tiny.cluster(nodes=3)
    keys = {Inputs().key(replace(CASE, cluster=c, model=tiny.model())) for c in (one, two, one)}
    assert len(keys) == 2


@dataclass(frozen=True)
class Mine:
    """A strategy of a user."""

    name: ClassVar[str] = "mine"
    steps: Any = 1

    schedule: ClassVar[Callable[..., Any]] = DDP().schedule
    memory: ClassVar[Callable[..., Any]] = DDP().memory


def test_a_strategy_of_a_user_counts_with_its_source() -> None:
    """And one that nobody can compare is refused with a reason."""
    key = Inputs().key
    assert key(replace(CASE, strategy=Mine())) == key(replace(CASE, strategy=Mine()))
    assert key(replace(CASE, strategy=Mine())) != key(replace(CASE, strategy=Mine(steps=2)))
    with pytest.raises(OptionError, match="nothing says when its results change"):
        key(replace(CASE, strategy=Mine(steps=object())))


def test_a_change_of_any_file_is_another_co2sim(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash of the source covers every folder, not only that of the module that makes it."""
    read, before = Path.read_bytes, own_identity.__wrapped__().source
    for name in ("co2.py", "a100-tcp80.toml"):
        changed = lambda path, name=name: read(path) + b"#" * (path.name == name)  # noqa: E731
        monkeypatch.setattr(Path, "read_bytes", changed)
        assert own_identity.__wrapped__().source != before
