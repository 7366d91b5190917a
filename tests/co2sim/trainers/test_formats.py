"""Files in the formats of all trainers, and what their questions are."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from commands import Command

from co2sim.catalog import Contents
from co2sim.common.errors import CatalogError
from co2sim.trainers.reading import Reading, read_trainer
from co2sim.trainers.tables import tables

FILES = Path(__file__).parent / "files"
EXPECTED: dict[str, dict[str, Any]] = tomllib.loads((FILES / "expected.toml").read_text())


def said(reading: Reading) -> dict[str, Any]:
    """A reading as `expected.toml` has it."""
    options = dict(reading.options)
    overrides, model = options.pop("overrides"), options.get("model")
    parts: dict[str, Any] = {"overrides": overrides}
    if isinstance(model, Contents):
        beside = {"name", "kind", "source"}
        parts["model"] = {k: v for k, v in options.pop("model").tree.items() if k not in beside}
    parts["missing"] = [key.name for key in reading.missing]
    parts["unknown"] = [key.name for key in reading.unknown]
    parts = {name: part for name, part in parts.items() if part}
    return {"trainer": reading.trainer, "options": options, **parts}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_is_the_question_that_it_asks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All options, the model, what is not counted, and nothing else."""
    for variable in ("TP_SIZE", "RECOMPUTE", "MBS", "PRIMUS_SEQ_LENGTH", "NEMO_TP", "NGPU"):
        monkeypatch.delenv(variable, raising=False)
    assert said(read_trainer(FILES / name)) == EXPECTED[name]


def test_each_trainer_has_three_files() -> None:
    """Of each table, by the name of its trainer."""
    whose = [entry["trainer"].split(" with ")[0] for entry in EXPECTED.values()]
    assert {table.title: whose.count(table.title) >= 3 for table in tables()} == {
        table.title: True for table in tables()
    }


def written(folder: Path, name: str, text: str) -> Path:
    """A file with this text."""
    path = folder / name
    path.write_text(text)
    return path


SCRIPT = (
    "torchrun --nproc_per_node 8 pretrain.py --num-layers 4 --hidden-size 64 --seq-length 64"
    " --num-attention-heads 4 --micro-batch-size $MBS --tensor-model-parallel-size ${TP}"
    " --global-batch-size $1\n"
)


def test_what_nothing_sets_has_to_be_given(tmp_path: Path) -> None:
    """All of it in one line, with the key; what is given counts."""
    reading = read_trainer(written(tmp_path, "run.sh", SCRIPT))
    with pytest.raises(CatalogError, match=r"run\.sh: micro_batch_size is \$MBS, .* --micro-batch"):
        reading.question(cluster="dgx-a100")
    case = reading.question(cluster="dgx-a100", micro_batch=2, tp=4, global_batch=8)
    assert (case.micro_batch, case.tp, case.gpus) == (2, 4, 8)


def test_a_variable_of_the_environment_is_one_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the script would have it; a parameter such as $1 stays open."""
    monkeypatch.setenv("MBS", "2")
    monkeypatch.setenv("TP", "4")
    reading = read_trainer(written(tmp_path, "run.sh", SCRIPT))
    assert (reading.options["micro_batch"], reading.options["tp"]) == (2, 4)
    assert set(reading.unset) == {"global_batch"}


def test_the_command_line_asks_for_what_is_open(tmp_path: Path, cli: Command) -> None:
    """It names the option; with all of them it answers."""
    path = str(written(tmp_path, "run.sh", SCRIPT))
    job = ("run", "--from", path, "-c", "dgx-a100")
    code, _, errors = cli(*job)
    assert (code, "which nothing sets; give --" in errors) == (2, True)
    more = ("--micro-batch", "2", "--tp", "4", "--global-batch", "8", "--json")
    assert cli(*job, *more)[0] == 0


def test_gpus_that_a_file_does_not_say_are_a_warning(tmp_path: Path) -> None:
    """The number of nodes is of the job, not of the training."""
    text = SCRIPT.replace("$MBS", "1").replace("${TP}", "2").replace("$1", "8")
    path = written(tmp_path, "run.sh", text.replace("_node 8", "_node $(nvidia-smi -L | wc -l)"))
    reading = read_trainer(path)
    assert "gpus" not in reading.options
    assert [key.became for key in reading.missing] == ["no number is set; give --gpus"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("model_parallel.tensor_model_parallel_size: 3", "tensor_model_parallel_size is 3: 3 GPUs"),
        ("tensor_model_parallel_size: many", "tensor_model_parallel_size is 'many'"),
        ("micro_batch_size: [1, 2]", "micro_batch_size is a list"),
        ("normalization: BatchNorm", "normalization is 'BatchNorm'; it is one of"),
        ("defaults: [no-such]", r"defaults names no-such\.yaml, which is no file beside it"),
        ("pipeline_model_parallel_size: 1.5", "pipeline_model_parallel_size is 1.5"),
    ],
)
def test_a_value_that_cannot_be_is_named(tmp_path: Path, line: str, words: str) -> None:
    """With the file and the key, in one line."""
    path = written(tmp_path, "a.yaml", f"trainer: {{devices: 8}}\nnum_layers: 4\n{line}\n")
    with pytest.raises(CatalogError, match=words) as caught:
        read_trainer(path).question(cluster="dgx-a100", model="llama3-8b")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_of_no_table_is_a_warning(tmp_path: Path, cli: Command) -> None:
    """The answer is there, and the key is named."""
    path = written(tmp_path, "a.toml", '[training]\nseq_len = 512\n[training.novel]\nthing = "x"\n')
    code, _, errors = cli("run", "--from", str(path), "-c", "dgx-a100", "-m", "llama3-8b", "--json")
    assert (code, "not known, and left out: training.novel.thing" in errors) == (0, True)


def test_flags_that_only_a_run_knows_are_named(tmp_path: Path) -> None:
    """A variable that a branch sets which cannot be followed may be any flag."""
    text = SCRIPT.replace("$MBS", "1").replace("${TP}", "2").replace("$1", "8").strip()
    branch = 'if [ $2 = sel ]; then AC="--recompute-activations"\nelse AC="--bf16"; fi\n'
    reading = read_trainer(written(tmp_path, "run.sh", f"{branch}{text} $AC\n"))
    assert [(key.name, key.became) for key in reading.missing] == [
        ("${AC}", "flags that only a run knows")
    ]


def test_a_script_that_grows_is_refused(tmp_path: Path) -> None:
    """Variables of variables double twenty times and more."""
    lines = ["A=aaaaaaaa", *["A=$A$A"] * 40, "torchrun x.py --num-layers $A"]
    with pytest.raises(CatalogError, match="grow beyond"):
        read_trainer(written(tmp_path, "run.sh", "\n".join(lines)))


def test_a_script_may_take_another_one_for_its_own(tmp_path: Path) -> None:
    """Of a folder that only a run knows the name beside it counts."""
    written(tmp_path, "common.sh", 'TP=4\n: "${MBS:=2}"\n')
    text = SCRIPT.replace("$1", "8")
    path = written(tmp_path, "run.sh", f'source "$(dirname "$0")/common.sh"\n{text}')
    reading = read_trainer(path)
    assert (reading.options["tp"], reading.options["micro_batch"]) == (4, 2)


def test_a_flag_that_is_off_states_nothing(tmp_path: Path) -> None:
    """Whether another key has switched it on, or none has."""
    text = "[parallelism]\nenable_async_tensor_parallel = false\n[training]\nseq_len = 512\n"
    reading = read_trainer(written(tmp_path, "a.toml", text))
    assert [key.name for key in reading.ignored] == ["parallelism.enable_async_tensor_parallel"]


def test_a_script_may_end_within_a_line(tmp_path: Path) -> None:
    """With a mark that the line goes on, as people leave it."""
    text = SCRIPT.replace("$MBS", "1").replace("${TP}", "2").replace("$1", "8").strip()
    assert read_trainer(written(tmp_path, "run.sh", f"{text} \\")).options["global_batch"] == 8
