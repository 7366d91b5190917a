"""Files of trainers as questions."""

import json
import math
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import Command
from hypothesis import given, reject
from hypothesis import strategies as st

from co2sim.catalog import Contents
from co2sim.common.errors import CatalogError, OptionError
from co2sim.prediction import driver
from co2sim.prediction.question import Question
from co2sim.report.text.launch import launch_text
from co2sim.schedule.schedule import Layout
from co2sim.strategies import parse
from co2sim.trainers import files, shell
from co2sim.trainers.reading import read_trainer
from co2sim.trainers.tables import LAUNCHERS, tables
from co2sim.trainers.writing import launch
from realrun.cli.app import app
from realrun.train.settings import TrainSettings, check

TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 4096
[parallelism]
data_parallel_replicate_degree = 2
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "full"
[compile]
enable = true
"""
MEGATRON = """
TP=4
NODES=${NODES:-2}
MODEL_ARGS=(
    --num-layers 16 --hidden-size 2048 --num-attention-heads 16
    --swiglu --normalization RMSNorm --vocab-size 32000 --seq-length 2048   # small
)
torchrun --nproc_per_node 8 --nnodes $NODES pretrain_gpt.py ${MODEL_ARGS[@]} \\
    --tensor-model-parallel-size ${TP} --sequence-parallel --use-distributed-optimizer \\
    --micro-batch-size 2 --global-batch-size 64 --bf16 --lr 3e-4 --multi-latent-attention
"""


def written(folder: Path, name: str, text: str) -> Path:
    """A file with this text."""
    path = folder / name
    path.write_text(text)
    return path


def test_a_toml_of_torchtitan_is_a_question(tmp_path: Path) -> None:
    """Its keys, its defaults where it has none, and its stack; GPUs are given."""
    reading = read_trainer(written(tmp_path, "job.toml", TITAN))
    case = reading.question(cluster="dgx-h100", gpus=32)
    assert case == Question(
        cluster="dgx-h100",
        model="llama3-8b",
        strategy="fsdp",
        gpus=32,
        micro_batch=1,
        accumulation=1,
        tp=2,
        sequence_parallel=True,
        precision="bf16",
        recompute="full",
        stack="torchtitan",
        overrides={"model.seq_len": "4096"},
    )


def test_a_script_of_megatron_is_a_question_with_its_model(tmp_path: Path) -> None:
    """Variables and arrays of the script are in their places; what has no option is named."""
    reading = read_trainer(written(tmp_path, "train.sh", MEGATRON))
    options = reading.options
    assert (options["gpus"], options["tp"], options["sequence_parallel"]) == (16, 4, True)
    assert (options["strategy"], options["micro_batch"], options["global_batch"]) == (
        "zero1",
        2,
        64,
    )
    model = options["model"]
    assert isinstance(model, Contents)
    assert (model.tree["layers"], model.tree["norm"], model.tree["ffn"]) == (16, "rmsnorm", 5440)
    assert [key.name for key in reading.missing] == ["multi_latent_attention"]
    assert {key.name for key in reading.ignored} == {"lr"}
    result = driver.run(reading.question(cluster="dgx-h100"))
    assert result.global_batch == 64


def test_tensor_parallel_gpus_of_megatron_share_experts_unless_a_key_says_another(
    tmp_path: Path,
) -> None:
    """Where some divide experts: its expert_tensor_parallel_size is that of tensor parallelism."""
    flags = "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2"
    script = MEGATRON.replace("--bf16", f"--bf16 {flags}")
    whole = script.replace("--bf16", "--bf16 --expert-tensor-parallel-size 1")
    alone = script.replace(" --expert-model-parallel-size 2", "")
    for text, etp in ((script, 4), (whole, 1), (alone, None)):
        reading = read_trainer(written(tmp_path, "train.sh", text))
        assert reading.options.get("etp") == etp
        assert not any(key.name.startswith("expert") for key in reading.missing)
    case = Question(
        cluster="dgx-h100", model="qwen3-30b-a3b", strategy="zero1", stack="megatron-core", gpus=16,
        tp=2, ep=4, sequence_parallel=True,
    )  # fmt: skip
    lines = launch(case, driver.run(case))
    assert lines is not None
    assert "--expert-tensor-parallel-size 1" in lines.text


def test_a_key_is_written_with_those_that_its_trainer_wants_beside_it() -> None:
    """Megatron-LM refuses full recomputation without a method, and asks for the positions."""
    case = Question(
        cluster="dgx-h100", model="llama3-8b", strategy="zero1", stack="megatron-core", gpus=8,
        recompute="full",
    )  # fmt: skip
    lines = launch(case, driver.run(case))
    assert lines is not None
    wanted = ("--recompute-method uniform", "--recompute-num-layers 1", "--group-query-attention")
    wanted += ("--max-position-embeddings 8192", "--hidden-dropout 0.0", "--attention-dropout 0.0")
    assert [flag for flag in wanted if flag not in lines.text.splitlines()] == []


def test_a_stage_of_torchtitan_has_its_own_batch() -> None:
    """Its local batch is that of all passes; selective recomputation is of operators."""
    case = Question(
        cluster="dgx-h100", model="llama3-8b", strategy="fsdp", stack="torchtitan", gpus=8, pp=2,
        micro_batch=2, accumulation=4, recompute="selective",
    )  # fmt: skip
    lines = launch(case, driver.run(case))
    assert lines is not None
    flags = set(lines.text.splitlines())
    assert {
        "--training.local_batch_size 8",
        "--parallelism.pipeline_parallel_microbatch_size 2",
        "--activation_checkpoint.selective_ac_option op",
    } <= flags


def test_a_log_of_megatron_states_its_arguments(tmp_path: Path) -> None:
    """With the number of its GPUs."""
    log = """
[rank0]: using world size: 16
------------------------ arguments ------------------------
  bf16 ............................................ True
  global_batch_size ............................... 64
  hidden_size ..................................... 2048
  micro_batch_size ................................ 2
  num_attention_heads ............................. 16
  num_layers ...................................... 16
  padded_vocab_size ............................... 50304
  seq_length ...................................... 2048
  tensor_model_parallel_size ...................... 2
  use_distributed_optimizer ....................... False
  world_size ...................................... 16
-------------------- end of arguments ---------------------
"""
    options = read_trainer(written(tmp_path, "out.log", log)).options
    assert (options["gpus"], options["tp"], options["strategy"]) == (16, 2, "ddp")


def test_an_option_of_the_command_line_wins_over_the_file(tmp_path: Path, cli: Command) -> None:
    """Numbers of the model, too; and what the file says is on the other stream."""
    path = written(tmp_path, "job.toml", TITAN)
    job = ("run", "--from", str(path), "-c", "dgx-h100", "-g", "8", "--json")
    plain, other = (
        cli(*job, *more)[1]
        for more in (
            (),
            ("--micro-batch", "2", "--set", "model.seq_len=2048", "--stack", "nanotron"),
        )
    )
    one, two = json.loads(plain), json.loads(other)
    assert (one["micro_batch"], two["micro_batch"]) == (1, 2)
    assert one["tokens_per_gpu_per_step"] == two["tokens_per_gpu_per_step"]
    assert "nanotron" in two["stack"]


def test_json_has_the_lines_that_launch_the_choice(tmp_path: Path, cli: Command) -> None:
    """As the text has them; what the file stated is in it."""
    path = written(tmp_path, "job.toml", TITAN)
    job = ("run", "--from", str(path), "-c", "dgx-h100", "-g", "8", "--launch")
    lines = json.loads(cli(*job, "--json")[1])["launch"]
    assert "--parallelism.tensor_parallel_degree 2" in lines
    assert lines in cli(*job)[1]


def test_what_is_given_in_place_of_the_file_is_named(tmp_path: Path, cli: Command) -> None:
    """With both values; what was given as the file has it is not."""
    path = written(tmp_path, "job.toml", TITAN)
    job = ("run", "--from", str(path), "-c", "dgx-h100", "-g", "8", "--tp", "2")
    assert "given instead" not in cli(*job).err
    last = cli(*job, "--micro-batch", "2", "-s", "ddp").err.splitlines()[-1]
    assert last == "given instead: micro_batch=2 (not 1), strategy=ddp (not fsdp)"


def test_a_batch_is_one_of_whole_replicas(tmp_path: Path) -> None:
    """Else DeepSpeed refuses it, too; the line names all three keys."""
    tree = {"train_batch_size": 100, "train_micro_batch_size_per_gpu": 3}
    tree |= {"gradient_accumulation_steps": 7}
    path = written(tmp_path, "ds.json", json.dumps(tree))
    with pytest.raises(CatalogError, match="train_batch_size is 100, no multiple of 21"):
        read_trainer(path)


def test_nodes_alone_leave_the_gpus_open(tmp_path: Path) -> None:
    """No file says how many a node of the cluster has."""
    text = "trainer: {num_nodes: 2, devices: auto, strategy: fsdp}\n"
    reading = read_trainer(written(tmp_path, "lit.yaml", text))
    with pytest.raises(CatalogError, match="num_nodes is 2, and no key says the GPUs of a node"):
        reading.question(cluster="dgx-h100", model="gpt2-xl")
    assert reading.question(cluster="dgx-h100", model="gpt2-xl", gpus=16).gpus == 16


def test_what_no_key_says_is_named_beside_the_lines() -> None:
    """Weights in 4 bits, and numbers of the model and of the stack that were changed."""
    case = Question(
        cluster="dgx-h100",
        model="llama3-8b",
        strategy="ddp",
        gpus=8,
        stack="huggingface",
        lora=8,
        quantize_base="nf4",
        overrides={"model.document": "1024", "model.seq_len": "4096", "stack.graphs": "0.5"},
    )
    lines = launch(case, driver.run(case))
    assert lines
    assert set(lines.beside) >= {"quantize_base nf4", "model.document 1024", "stack.graphs 0.5"}
    assert not any("seq_len" in text for text in lines.beside)


def test_a_plan_chooses_what_it_varies(tmp_path: Path, cli: Command) -> None:
    """The file says model and stack; how GPUs divide it is found."""
    path = written(tmp_path, "job.toml", TITAN)
    more = ("-c", "dgx-h100", "-g", "8", "--tokens", "1e10", "--json")
    answer = json.loads(cli("plan", "--from", str(path), *more)[1])
    assert answer["choice"]
    assert answer["candidates"] > 10


def test_deepspeed_quantizes_where_it_is_told_to(tmp_path: Path) -> None:
    """Stage 3 with quantized weights is ZeRO++, with the other parts off."""
    tree = {
        "zero_optimization": {"stage": 3, "zero_quantized_weights": True},
        "bf16": {"enabled": True},
    }
    options = read_trainer(written(tmp_path, "ds.json", json.dumps(tree))).options
    assert options["strategy"] == "zeropp(hpz=false, qgz=false)"


def test_a_file_may_name_another_one(tmp_path: Path) -> None:
    """Axolotl's names DeepSpeed's; of what both say the first counts."""
    written(tmp_path, "ds.json", '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}')
    text = "base_model: NousResearch/Meta-Llama-3-8B\nsequence_len: 4096\nmicro_batch_size: 2\n"
    path = written(tmp_path, "ax.yaml", text + "deepspeed: ds.json\n")
    reading = read_trainer(path)
    assert (reading.options["strategy"], reading.options["micro_batch"]) == ("zero2", 2)
    assert len(reading.files) == 2
    (tmp_path / "ds.json").unlink()
    with pytest.raises(CatalogError, match=r"deepspeed names ds\.json, which is no file"):
        read_trainer(path).question(cluster="dgx-h100")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "x = ", "is no TOML"),
        ("a.json", "[1]", "has no keys"),
        ("a.yaml", "a: [", "is no YAML: line"),
        ("a.yaml", "learning: 1", "no trainer is known by its keys"),
        ("a.txt", "hello world", "has no keys"),
        ("a.toml", TITAN.replace("= 1\n", '= "many"\n'), "training.local_batch_size is 'many'"),
        ("a.toml", TITAN.replace('"full"', '"some"'), "memory_budget"),
    ],
)
def test_a_file_that_is_wrong_gets_one_line(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    """With the file, and the key where there is one; a choice that is not known is a warning."""
    path = written(tmp_path, name, text)
    if words == "memory_budget":
        assert words in read_trainer(path).missing[0].became
        return
    with pytest.raises(CatalogError, match=words) as caught:
        read_trainer(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_merges_of_yaml_do_not_grow_without_end(tmp_path: Path) -> None:
    """A short file of aliases of aliases is refused before it fills the memory."""
    names = [
        f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}], k{i}: 1}}" for i in range(1, 40)
    ]
    path = written(tmp_path, "a.yaml", "\n".join(["a0: &a0 {k: 1}", *names]))
    with pytest.raises(CatalogError, match="more than"):
        read_trainer(path)


@given(st.text(st.characters(codec="utf-8"), max_size=200))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    """As flags, whatever quotes, variables and arrays it has."""
    content = files.of_script(shell.read(text, {}))
    assert all(isinstance(key, str) for key in content.values)


def test_every_table_takes_what_a_question_has() -> None:
    """Options of tables are those that are put together, and what is written is taken."""
    parts = {"replicas", "shards", "nodes", "gpus_per_node", "data_parallel", "narrow", "size"}
    parts |= {"chunk_layers", "tasks_per_node", "adapted", "grouped", "narrow_as", "within_fsdp"}
    parts |= {"fsdp_version", "model_file", "micro_tokens", "stage_batch", "recompute_every"}
    parts |= {
        "weights",
        "stage_steps",
        "batch_tokens",
        "parts",
        "splits",
        "first_less",
        "last_less",
    }
    options = set(Question.__dataclass_fields__) | parts
    for table in (*tables(), LAUNCHERS):
        for key, take in table.take.items():
            head = take.option.partition(".")[0]
            assert take.option in options or head in {"model", "stack", "strategy", "dim"}, key
        if table.launch:
            assert set(table.launch.keys) <= set(table.take)


JOBS = {
    "torchtitan": ("fsdp", "fsdp(shard=node)", "fsdp(reshard_after_forward=false)", "ddp"),
    "torchtitan-eager": ("fsdp",),
    "megatron-core": ("ddp", "zero1", "fsdp(reduce=bf16, version=megatron)"),
    "nanotron": ("ddp", "zero1"),
    "huggingface": (
        "ddp",
        "fsdp(sync=last, version=1)",
        "zero2",
        "zero3",
        "zeropp",
        "zeropp(hpz=false)",
    ),
    "Lightning": ("ddp", "fsdp(version=1)", "zero1", "zero2", "zero3"),
    "axolotl": ("fsdp(sync=last)", "fsdp(shard=node, sync=last)", "fsdp(sync=last, version=1)"),
}
ASKING = {"Lightning": "torchtitan-eager", "axolotl": "huggingface"}
"""Stacks of trainers that are written where they ask."""


@given(st.data())
def test_what_is_written_is_read_as_the_same_job(data: st.DataObject) -> None:
    """Stack, strategy, batch, precision, recomputation, and how GPUs divide the model."""
    folder = Path(data.draw(st.just(str(FOLDER))))
    trainer = data.draw(st.sampled_from(sorted(JOBS)))
    stack = ASKING.get(trainer, trainer)
    strategy = data.draw(st.sampled_from(JOBS[trainer]))
    divides = trainer not in {"huggingface", *ASKING} and strategy != "ddp"
    tp = data.draw(st.sampled_from((1, 2, 4))) if divides else 1
    lines_up = stack in {"megatron-core", "torchtitan-eager"} and divides
    pp = data.draw(st.sampled_from((1, 2))) if lines_up else 1
    in_v = stack == "torchtitan-eager" and pp > 1 and data.draw(st.booleans())
    steps = data.draw(st.sampled_from((1, 4)))
    case = Question(
        cluster="dgx-h100",
        model="llama3-8b",
        strategy=strategy,
        gpus=16,
        stack=stack,
        tp=tp,
        pp=pp,
        schedule="zbv" if in_v else "1f1b",
        sequence_parallel=tp > 1,
        micro_batch=data.draw(st.sampled_from((1, 2))),
        accumulation=steps,
        precision="bf16",
        recompute=data.draw(st.sampled_from(("none", "full"))),
    )
    result = driver.run(case)
    lines = launch(case, result, trainer)
    assert lines
    assert not any(" of " in text or "strategy" in text for text in lines.beside)
    path = folder / f"{stack}.sh"
    path.write_text(str(lines))
    more = {"recompute": "full"} if "recompute full" in lines.beside else {}
    model = {} if "model" in read_trainer(path).options else {"model": "llama3-8b"}
    assert not read_trainer(path).unknown
    again = read_trainer(path).question(cluster="dgx-h100", **model, **more)
    assert (again.stack, again.parsed.name) == (stack, case.parsed.name)
    assert again.schedule == case.schedule
    names = ("tp", "pp", "sequence_parallel", "micro_batch", "precision", "recompute", "gpus")
    assert [getattr(again, n) for n in names] == [getattr(case, n) for n in names]
    other = driver.run(again)
    assert other.accumulation == steps
    assert math.isclose(other.step_time_s, result.step_time_s, rel_tol=0.02)


def test_a_script_writes_its_file_and_starts_what_reads_it(tmp_path: Path, cli: Command) -> None:
    """All that is printed is one script: saved, it runs in a shell, and is a question."""
    job = ("-c", "dgx-h100", "-m", "llama3-8b")
    asked = ("-s", "zero2", "-g", "16", "--stack", "huggingface", "--recompute", "none")
    _, out, err = cli("run", *job, *asked, "--launch")
    assert "zero2 on 16 GPUs trains" in err
    path = written(tmp_path, "launch.sh", out)
    written(tmp_path, "deepspeed", '#!/bin/sh\necho "$@" > words\n').chmod(0o755)
    where = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(["/bin/sh", "-eu", str(path)], cwd=tmp_path, env=where, check=True)
    tree = json.loads((tmp_path / "ds_config.json").read_text())
    assert tree["zero_optimization"]["stage"] == 2
    words = (tmp_path / "words").read_text()
    assert words == "--num_nodes 2 --num_gpus 8 train.py --deepspeed ds_config.json\n"
    (tmp_path / "ds_config.json").unlink()
    first, again = (
        json.loads(cli("run", *job, *some, "--json")[1]) for some in (asked, ("--from", str(path)))
    )
    assert first["tokens_per_s"] == again["tokens_per_s"]


def test_a_file_is_answered_in_its_own_keys(cli: Command) -> None:
    """Where the trainer has the choice; what it has no key for is named, or another one has it."""
    path = str(Path(__file__).parent / "files" / "lightning-cli.yaml")
    job = ("run", "--from", path, "-c", "dgx-h100", "--launch")
    ours = cli(*job).out
    assert "main.py fit --config lightning.yaml" in ours
    assert "# not in it: shard=node of fsdp, " in ours
    other = json.loads(cli(*job, "--stack", "megatron-core", "-s", "zero1", "--json").out)
    assert "pretrain_gpt.py" in other["launch"]


def test_a_plan_has_its_script_in_json(cli: Command) -> None:
    """That of the choice."""
    job = ("-c", "dgx-h100", "-m", "gpt2-small", "-g", "8", "--tokens", "1e9", "-s", "slowmo")
    answer = json.loads(cli("plan", *job, "--launch", "--json")[1])
    assert "-m realrun train" in answer["launch"]


def of_realrun(script: str) -> dict[str, Any]:
    """What the command line of realrun reads of the command of a script."""
    words = shlex.split(script.replace("\\\n", ""), comments=True)
    command: Any = typer.main.get_command(app)
    where = words.index("train")
    assert words[where - 2 : where] == ["-m", "realrun"]
    return command.commands["train"].make_context("train", words[where + 1 :]).params


TAUS, FEW, KEEP = st.integers(1, 64), st.integers(1, 3), st.sampled_from(("0.5", "1"))
LOCAL = st.one_of(
    st.builds("local_sgd:tau={}".format, TAUS),
    st.builds("overlap_local_sgd:tau={}".format, TAUS),
    st.builds("slowmo:tau={}".format, TAUS),
    st.builds("diloco:tau={},fragments={},delay={}".format, TAUS, FEW, FEW),
    st.builds("co2:tau={},delay={},keep={}".format, TAUS, FEW, KEEP),
    st.builds("co2:preview=true,keep={},fragments={}".format, KEEP, FEW),
    st.builds("co2.published:tau={},staleness={}".format, TAUS, FEW),
)
WORKER = st.sampled_from(
    [
        *("", ",worker=node", ",worker=node,inner=ddp", ",worker=node,inner=zeropp"),
        *(",worker=node,inner=fsdp", ",worker=node,inner=zero1", ",worker=node,dtype=bf16"),
        *(",dtype=int8", ",dtype=fp16", ",average=leader,worker=node"),
    ]
)


@given(LOCAL, WORKER)
def test_realrun_reads_the_method_that_was_written(text: str, worker: str) -> None:
    """With its numbers, batch and optimizer; or it would refuse it, and nothing is written."""
    try:
        case = Question(cluster="a100-tcp80", model="gpt2-small", strategy=text + worker, gpus=16)
        result = driver.run(case)
    except OptionError:  # such as a delay beyond tau, which no question has
        reject()
    lines = launch(case, result)
    if lines is None:
        made = TrainSettings(strategy=result.strategy, batch=16)
        with pytest.raises(OptionError, match="cannot be trained with"):
            check(made, Layout(2, 8))
        return
    said = of_realrun(str(lines))
    names = ("strategy", "batch", "optimizer")
    made = TrainSettings(**{name: said[name] for name in names})
    check(made, Layout(2, 8))
    assert made.parsed == parse(result.strategy)
    assert (made.batch, made.optimizer) == (result.global_batch, "adamw")
    assert said["backend"] == "nccl"
    assert set(lines.beside) >= {"model gpt2-small", "precision bf16"}


def test_a_local_method_is_read_as_it_was_written(tmp_path: Path) -> None:
    """From the script, by us: method, batch and GPUs."""
    case = Question(
        cluster="two-sites-wan", model="gpt2-small", strategy="co2:worker=site", gpus=64,
        micro_batch=4, stack="torchtitan-eager", precision="bf16",
    )  # fmt: skip
    result = driver.run(case)
    script = launch_text(case, result)
    assert "REALRUN_SITES=2 torchrun" in script
    reading = read_trainer(written(tmp_path, "launch.sh", script))
    more = {"cluster": case.cluster, "model": case.model, "precision": "bf16"}
    again = driver.run(reading.question(**more))
    assert (again.strategy, again.gpus) == (result.strategy, 64)
    assert again.step_time_s == result.step_time_s


FOLDER = Path()


@pytest.fixture(autouse=True, scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    global FOLDER  # noqa: PLW0603 - Hypothesis wants no fixture of a function
    FOLDER = tmp_path_factory.mktemp("written")
