"""A case without files, and its key: what workers on other machines get, and what resuming asks."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tiny
from places import DATA

import co2sim
from co2sim import DDP, Noise, OptionError, PublishedCO2, Question, run
from co2sim.catalog import Contents
from co2sim.common.version import own_identity
from co2sim.studies.results_folder import Inputs

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
        "sequence_parallel": True,
        "pp": 2,
        "interleave": 2,
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
