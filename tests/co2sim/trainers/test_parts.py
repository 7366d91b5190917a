"""Parts of files, what a trainer assumes, and what keys say together."""

import json
from pathlib import Path

import pytest
from commands import Command

from co2sim.catalog import Contents
from co2sim.common.errors import CatalogError
from co2sim.trainers import python
from co2sim.trainers.reading import lines, read_trainer


def written(folder: Path, name: str, text: str) -> Path:
    """A file with this text."""
    path = folder / name
    path.write_text(text)
    return path


TWO = """
python prepare.py --workers 4
torchrun --nproc_per_node 8 train.py --model_name_or_path a/Llama-3.1-8B --bf16 \\
  --per_device_train_batch_size 2 --gradient_checkpointing
torchrun --nproc_per_node 4 train.py --model_name_or_path a/Qwen3-8B \\
  --per_device_train_batch_size 4
"""


def test_of_several_trainings_of_a_script_the_first_is_read(tmp_path: Path) -> None:
    """What follows evaluates it, exports it, or is another one: its flags are not among these."""
    options = read_trainer(written(tmp_path, "run.sh", TWO)).options
    names = ("model", "micro_batch", "gpus", "precision")
    assert [options[name] for name in names] == ["llama3-8b", 2, 8, "bf16"]


def test_the_trainings_of_a_script_are_counted(tmp_path: Path) -> None:
    """In a warning that says how another one is chosen; a single one has none."""
    path = written(tmp_path, "run.sh", TWO)
    warning = f"warning: {path} starts 2 trainings, of which one is read; {path}:N reads another"
    assert any(line.startswith(warning) for line in lines(read_trainer(path)))
    alone = written(tmp_path, "one.sh", TWO[: TWO.index("torchrun --nproc_per_node 4")])
    assert not read_trainer(alone).notes


def test_a_number_behind_a_script_chooses_a_training(tmp_path: Path) -> None:
    """Also behind the name of a trainer; flags of the others do not count."""
    path = written(tmp_path, "run.sh", TWO)
    for text in (f"{path}:2", f"transformers:{path}:2"):
        options = read_trainer(text).options
        assert [options[n] for n in ("model", "micro_batch", "recompute")] == [
            "qwen3-8b",
            4,
            "none",
        ]


@pytest.mark.parametrize("part", ["3", "0", "train"])
def test_a_training_that_a_script_has_not_is_refused(tmp_path: Path, part: str) -> None:
    """In a line with those that it has."""
    path = written(tmp_path, "run.sh", TWO)
    with pytest.raises(CatalogError, match=r"its trainings are \S+run\.sh:1 to \S+run\.sh:2$"):
        read_trainer(f"{path}:{part}")


def test_a_file_of_keys_has_no_parts(tmp_path: Path) -> None:
    """Such as JSON: the line says which files have some."""
    path = written(tmp_path, "ds.json", '{"zero_optimization": {"stage": 2}}')
    with pytest.raises(CatalogError, match="only a script or a file of Python has parts"):
        read_trainer(f"{path}:2")


MEGATRON = """
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 16 --hidden-size 2048 --bf16 --swiglu \\
  --num-attention-heads 16 --seq-length 2048 --micro-batch-size 2 --tokenizer-type Some
"""


def test_what_a_trainer_assumes_is_printed(tmp_path: Path) -> None:
    """The words that the tokenizer does not say, the width of layers, and its defaults."""
    text = next(
        line
        for line in lines(read_trainer(written(tmp_path, "run.sh", MEGATRON)))
        if line.startswith("assumed, as no key says it: ")
    )
    wanted = ("vocab 50304 of the model", "ffn 5440 of the model", "-s ddp", "--recompute none")
    assert [words for words in wanted if words not in text] == []


def test_what_a_key_says_is_not_assumed(tmp_path: Path) -> None:
    """Neither where a part of an option says it, such as tokens of a micro-batch."""
    more = " --vocab-size 32000 --ffn-hidden-size 4096 --recompute-granularity full"
    reading = read_trainer(written(tmp_path, "run.sh", f"{MEGATRON.rstrip()}{more}"))
    assert not any(word in " ".join(reading.assumed) for word in ("vocab", "ffn", "recompute"))
    text = "[training]\nnum_tokens_per_microbatch_per_dp_rank = 8192\n"
    reading = read_trainer(written(tmp_path, "job.toml", text))
    assert not any("micro-batch" in words for words in reading.assumed)


def test_layers_of_megatron_are_two_thirds_as_wide_beside_gates(tmp_path: Path) -> None:
    """Of four times the hidden size, in multiples of 64, where no flag says it."""
    for flag, width in ((" --swiglu", 5440), ("", 8192)):
        path = written(tmp_path, "run.sh", MEGATRON.replace(" --swiglu", flag))
        model = read_trainer(path).options["model"]
        assert isinstance(model, Contents)
        assert model.tree["ffn"] == width


def test_a_trainer_whose_keys_a_file_has_not_is_refused(tmp_path: Path, cli: Command) -> None:
    """In a line that says whose they are."""
    path = written(
        tmp_path, "ds.json", '{"zero_optimization": {"stage": 2}, "optimizer": {"a": 1}}'
    )
    code, _, errors = cli(
        "run", "--from", f"torchtitan:{path}", "-c", "dgx-h100", "-m", "llama3-8b"
    )
    words = f"has no key of torchtitan; its keys are of DeepSpeed: give {path} or deepspeed:{path}"
    assert (code, words in errors) == (2, True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "ds.json",
            '{"bf16": {"enabled": true}, "fp16": {"enabled": true}, "train_batch_size": 8}',
        ),
        ("a.yaml", "base_model: a/Llama-3.1-8B\nbf16: true\nfp16: true\n"),
        ("t.yaml", "per_device_train_batch_size: 1\nbf16: true\nfp16: true\n"),
        ("run.sh", f"{MEGATRON.rstrip()} --fp16"),
    ],
)
def test_two_types_at_once_are_refused(tmp_path: Path, name: str, text: str) -> None:
    """As the trainers do, in a line with both keys."""
    path = written(tmp_path, name, text)
    with pytest.raises(CatalogError, match=r"bf16\S* and fp16\S* are both true") as caught:
        read_trainer(path)
    assert "\n" not in str(caught.value)


STAGES = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 8
seq_len = 8192
[parallelism]
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
"""
LAYERS = "pipeline_parallel_layers_per_stage"
FIRST, LAST = (f"pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))


@pytest.mark.parametrize(
    ("more", "chunks"),
    [
        ("", 2),
        (f"{LAYERS} = 3", 3),
        (f"{LAYERS} = 2\n{FIRST} = 0\n{LAST} = 0", 4),
        (f"module_fqns_per_model_part = {[['layers.0']] * 16}", 4),
        (f"pipeline_parallel_split_points = {['layers.1'] * 11}", 3),
    ],
)
def test_chunks_of_torchtitan_follow_from_its_keys(tmp_path: Path, more: str, chunks: int) -> None:
    """Two where none says it; what is beside the layers counts as one at each end."""
    reading = read_trainer(written(tmp_path, "job.toml", STAGES + more))
    options = reading.options
    assert (options["schedule"], options["interleave"], reading.missing) == ("1f1b", chunks, ())


def test_parts_that_stages_cannot_share_are_refused(tmp_path: Path) -> None:
    """With the key: 34 layers and ends of 5 are 7 parts, which 4 stages have not."""
    path = written(tmp_path, "a.toml", f"{STAGES}{LAYERS} = 5")
    with pytest.raises(CatalogError, match="layers_per_stage is 5; the layers in 4 stages"):
        read_trainer(path)


def test_zero_bubble_of_torchtitan_is_a_schedule(tmp_path: Path) -> None:
    """InterleavedZeroBubble has chunks in turn, ZBVZeroBubble those of a V."""
    for name, schedule, chunks in (("Interleaved", "zb_h1", 2), ("ZBV", "zbv", None)):
        text = STAGES.replace("Interleaved1F1B", f"{name}ZeroBubble")
        options = read_trainer(written(tmp_path, "job.toml", text)).options
        assert (options["schedule"], options.get("interleave")) == (schedule, chunks)


def test_the_class_of_a_model_is_one_of_the_catalog(tmp_path: Path) -> None:
    """As Megatron-Bridge and NeMo 2 name their sizes."""
    for name, model in {
        "megatron.bridge.models.llama.Llama3ModelProvider8B": "llama3-8b",
        "megatron.bridge.models.llama.Llama32ModelProvider1B": "llama3.2-1b",
        "megatron.bridge.models.qwen.Qwen25ModelProvider7B": "qwen2.5-7b",
        "megatron.bridge.models.qwen.Qwen3MoEModelProvider30B_A3B": "qwen3-30b-a3b",
        "Llama3Config70B": "llama3-70b",
    }.items():
        text = f"model: {{_target_: {name}, tensor_model_parallel_size: 2}}\n"
        assert read_trainer(written(tmp_path, "a.yaml", text)).options["model"] == model


DUMP = {
    "model_spec": {"name": "llama3", "flavor": "8B", "model": {"dim": 4096, "layers": [{"a": 1}]}},
    "training": {
        "num_tokens_per_microbatch_per_dp_rank": 8192,
        "num_tokens_per_train_step": -1,
        "max_context_length": 8192,
        "dtype": "float32",
    },
    "parallelism": {"pipeline_parallel_degree": 2, "num_pp_microbatches": 4},
    "activation_checkpoint": {"force_recompute_mm_shapes_by_fqns": ["moe.router.gate"]},
    "compile": {"enable": True, "components": ["model", "loss"]},
}


@pytest.mark.parametrize("name", ["out.log", "config.json"])
def test_the_config_that_torchtitan_logs_is_read(tmp_path: Path, name: str) -> None:
    """In its log, with the marks of ranks, or in the file that it saves."""
    text = json.dumps(DUMP, indent=2)
    log = f"[titan] 2026-08-01 - root - INFO - Running with configs: {text}\nstep: 1  loss: 8.0\n"
    marked = "".join(f"[rank0]:{line}\n" for line in log.splitlines())
    reading = read_trainer(written(tmp_path, name, marked if name == "out.log" else text))
    names = ("model", "micro_batch", "accumulation", "pp", "stack")
    assert [reading.options[n] for n in names] == ["llama3-8b", 1, 4, 2, "torchtitan"]
    assert not reading.unknown


def test_what_torchtitan_logs_of_its_classes_tells_them_apart(tmp_path: Path) -> None:
    """SelectiveAC has a key that FullAC has not; older versions have a mode."""
    usual = {"preserve_rng_state": True, "determinism_check": "default", "debug": False}
    kinds = {"full": {}, "selective": DUMP["activation_checkpoint"], "none": {"mode": "none"}}
    for recompute, more in kinds.items():
        text = json.dumps({**DUMP, "activation_checkpoint": {**usual, **more}})
        reading = read_trainer(written(tmp_path, "config.json", text))
        assert reading.options["recompute"] == recompute


def test_a_batch_of_torchtitan_may_be_in_tokens(tmp_path: Path) -> None:
    """Of a step: a whole number of sequences."""
    tree = {"training": {**DUMP["training"], "num_tokens_per_train_step": 64 * 8192}}
    path = written(tmp_path, "config.json", json.dumps({**DUMP, **tree}))
    options = read_trainer(path).options
    assert (options["global_batch"], "accumulation" in options) == (64, False)


RECIPE = """
BATCH = 2 * 4

def parts(size: int = 8, ways=1):
    plan = run.Config(nl.MegatronStrategy, tensor_model_parallel_size=ways, sequence_parallel=True)
    return run.Config(nl.Trainer, devices=size, num_nodes=2, plugins=bf16_mixed(), strategy=plan)

def recipe(fast: bool = False, ways: int = 4) -> run.Partial:
    recipe = run.Partial(
        pretrain,
        model=run.Config(LlamaModel, config=run.Config(Llama3Config8B)),
        trainer=parts(ways=ways),
        data=run.Config(Data, seq_length=1024 * 8, global_batch_size=BATCH, micro_batch_size=SIZE),
        optim=distributed_fused_adam_with_cosine_annealing(max_lr=3e-4),
    )
    if fast:
        recipe.trainer.strategy.tensor_model_parallel_size = 8
    recipe.data.micro_batch_size = 2
    return recipe
"""


def test_a_recipe_in_python_is_read(tmp_path: Path) -> None:
    """Of calls with literals, sums, parameters and other functions; branches that hold."""
    options = read_trainer(f"{written(tmp_path, 'a.py', RECIPE)}:recipe").options
    names = ("model", "tp", "sequence_parallel", "gpus", "precision", "global_batch", "micro_batch")
    assert [options[n] for n in names] == ["llama3-8b", 4, True, 16, "bf16", 8, 2]
    assert options["strategy"] == "zero1"


def test_a_config_of_torchtitan_in_python_is_read(tmp_path: Path) -> None:
    """Its function names the model, and classes what is computed again."""
    text = (
        "def llama3_8b():\n"
        "    return Trainer.Config(training=TrainingConfig(max_context_length=8192,"
        " num_tokens_per_microbatch_per_dp_rank=2 * 8192),"
        " activation_checkpoint=FullAC.Config(), compile=CompileConfig(enable=True))\n"
    )
    options = read_trainer(written(tmp_path, "a.py", text)).options
    names = ("model", "micro_batch", "recompute", "stack")
    assert [options[n] for n in names] == ["llama3-8b", 2, "full", "torchtitan"]


def test_of_several_functions_one_has_to_be_chosen(tmp_path: Path) -> None:
    """The line names them, also where the name is none of them."""
    path = written(tmp_path, "a.py", RECIPE)
    for text in (str(path), f"{path}:other"):
        with pytest.raises(CatalogError, match="FILE:NAME reads a function, one of parts, recipe"):
            read_trainer(text)


def test_what_python_does_not_say_has_to_be_given(tmp_path: Path) -> None:
    """A name that only a run knows is open, as a variable of a script is."""
    path = written(tmp_path, "a.py", RECIPE.replace("    recipe.data.micro_batch_size = 2\n", ""))
    with pytest.raises(CatalogError, match=r"data\.micro_batch_size is \$SIZE, which nothing sets"):
        read_trainer(f"{path}:recipe").question(cluster="dgx-h100")


@pytest.mark.parametrize(
    "text",
    ["def a(:\n", "x = 1\n", "def a():\n    return a()\n", "(" * 500, "def a():\n  return 1\n"],
)
def test_python_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    """In a line, also where it calls itself without end."""
    path = written(tmp_path, "a.py", text)
    with pytest.raises(CatalogError, match=r"a\.py") as caught:
        read_trainer(path)
    assert "\n" not in str(caught.value)


def test_functions_that_call_each_other_end() -> None:
    """Each twice the next one: 2**40 calls are refused, not followed."""
    text = "".join(f"def f{i}():\n    return C(a=f{i + 1}(), b=f{i + 1}())\n" for i in range(40))
    with pytest.raises(ValueError, match="call each other more than"):
        python.read(f"{text}def f40():\n    return 1\n", "f0")


@pytest.mark.parametrize("fsdp", ["full_shard auto_wrap", "shard_grad_op"])
def test_fsdp_of_transformers_is_in_its_stack(tmp_path: Path, cli: Command, fsdp: str) -> None:
    """Gradients are reduced in the last step alone, as Accelerate does: nothing is a what-if."""
    text = f'{TWO[: TWO.index("torchrun --nproc_per_node 4")].rstrip()} --fsdp "{fsdp}"\n'
    path = written(tmp_path, "run.sh", text)
    assert "what-if" not in cli("run", "--from", str(path), "-c", "dgx-h100")[1]


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("a.yaml", "num_layers: 4\nuse_te_new_attention: true\n", "use_te_new_attention"),
        ("a.yaml", "num_layers: 4\nmoe_token_novel: 2\n", "moe_token_novel"),
        ("t.yaml", "num_train_epochs: 1\nddp_novel: 2\n", "ddp_novel"),
        ("t.yaml", "num_train_epochs: 1\nfsdp_config: {novel: 2}\n", "fsdp_config.novel"),
    ],
)
def test_a_new_key_is_not_taken_for_an_old_one(
    tmp_path: Path, name: str, text: str, key: str
) -> None:
    """Keys that do not matter are named one by one: a new one beside them is a warning."""
    reading = read_trainer(written(tmp_path, name, text))
    assert [unknown.name for unknown in reading.unknown] == [key]


@pytest.mark.parametrize(
    ("text", "option", "value"),
    [
        ("fsdp: full_shard\nfsdp_config: {cpu_offload: true}", "offload", "parameters"),
        ("parallelism_config: {tp_size: 2}", "tp", 2),
        ("activation_checkpointing: true", "recompute", "full"),
        ("gradient_checkpointing_kwargs: {use_reentrant: true}", "checkpointing", "reentrant"),
        ("adafactor: true", "optimizer", "adafactor"),
    ],
)
def test_keys_of_transformers_that_matter_are_taken(
    tmp_path: Path, text: str, option: str, value: object
) -> None:
    """Also of its version 5, which renames some, and within other keys."""
    path = written(tmp_path, "t.yaml", f"per_device_train_batch_size: 1\n{text}\n")
    assert read_trainer(path).options[option] == value


@pytest.mark.parametrize(
    "key",
    [
        "moe_expert_capacity_factor: 1.5",
        "enable_zero_bubble: true",
        "fp8_dot_product_attention: true",
        "optimizer_offload_fraction: 0.5",
        "moe_router_num_groups: 4",
        "rampup_batch_size: 32",
    ],
)
def test_keys_of_megatron_that_matter_are_warnings(tmp_path: Path, key: str) -> None:
    """Where they have no option, though many beside them do not matter."""
    reading = read_trainer(written(tmp_path, "a.yaml", f"num_layers: 4\n{key}\n"))
    assert [missing.name for missing in reading.missing] == [key.partition(":")[0]]


OF_TRL = """
model_name_or_path: a/Qwen2.5-3B-Instruct
bf16: true
per_device_train_batch_size: 1
max_prompt_length: 512
max_completion_length: 1024
num_generations: 8
"""
GRPO = "accelerate launch --num_processes 2 grpo.py --config recipes/usa.yaml --learning_rate 5e-6"


def test_a_yaml_behind_a_flag_is_read_with_its_script(tmp_path: Path) -> None:
    """As TRL hands its recipe on; one that is not here leaves its trainer unknown."""
    script = written(tmp_path, "run.sh", GRPO)
    with pytest.raises(CatalogError, match="no trainer is known"):
        read_trainer(script)
    (tmp_path / "recipes").mkdir()
    written(tmp_path / "recipes", "usa.yaml", OF_TRL)
    options = read_trainer(script).options
    assert [options[name] for name in ("model", "micro_batch", "gpus")] == ["qwen2.5-3b", 1, 2]


@pytest.mark.parametrize(
    ("more", "length"), [("", "1536"), ("max_length: 2048", "2048"), ("no", "")]
)
def test_a_sequence_of_two_parts_is_as_long_as_both(tmp_path: Path, more: str, length: str) -> None:
    """A key that says all of it wins, and one part alone says nothing."""
    text = OF_TRL + more if more != "no" else OF_TRL.replace("max_prompt_length: 512", "")
    overrides = read_trainer(written(tmp_path, "recipe.yaml", text)).options["overrides"]
    assert overrides.get("model.seq_len", "") == length


def test_answers_that_a_training_makes_are_not_counted(tmp_path: Path) -> None:
    """The time of GRPO's generation comes on top, which a warning says."""
    reading = read_trainer(written(tmp_path, "recipe.yaml", OF_TRL))
    assert [key.name for key in reading.missing] == ["num_generations"]


def test_what_a_template_leaves_open_has_to_be_given(tmp_path: Path) -> None:
    """A value in {{braces}} is one that nothing sets."""
    text = "parallelism: {dp: 4, recompute_layer: '{{RECOMPUTE}}'}\ntokens: {micro_batch_size: 2}\n"
    reading = read_trainer(written(tmp_path, "config.yaml", text))
    with pytest.raises(CatalogError, match=r"recompute_layer is \{\{RECOMPUTE\}\}, which nothing"):
        reading.refuse_unset(())
    reading.refuse_unset({"recompute"})


@pytest.mark.parametrize(("stage", "offload"), [(2, None), (3, "parameters")])
def test_parameters_are_on_the_host_in_stage_3_alone(
    tmp_path: Path, stage: int, offload: str | None
) -> None:
    """DeepSpeed's offload_param says nothing beside stage 2, in its JSON and in Accelerate's."""
    ours = {"distributed_type": "DEEPSPEED"}
    ours["deepspeed_config"] = {"zero_stage": stage, "offload_param_device": "cpu"}
    theirs = {"zero_optimization": {"stage": stage, "offload_param": {"device": "cpu"}}}
    for name, tree in (("accelerate.json", ours), ("deepspeed.json", theirs)):
        reading = read_trainer(written(tmp_path, name, json.dumps(tree)))
        assert reading.options.get("offload") == offload, name


HYDRA = """
torchrun --nproc_per_node=4 pretrain.py --config-path=/home/a/conf --config-name=gpt_config \\
  trainer.precision=bf16 model.micro_batch_size=2 model.global_batch_size=8
"""
NEMO = """
trainer: {precision: 16}
model:
  {micro_batch_size: 4, tensor_model_parallel_size: 2, encoder_seq_length: 512, num_layers: 12,
  hidden_size: 768, num_attention_heads: 12, fp8: false, fp8_hybrid: true, cpu_offloading: false,
  cpu_offloading_weights: true}
"""


def test_the_config_that_hydra_names_is_read(tmp_path: Path) -> None:
    """Without its ending, in the folder conf of one above; keys of the command win."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "scripts").mkdir()
    script = written(tmp_path / "scripts", "run.sh", HYDRA)
    assert "model" in read_trainer(script).unset
    written(tmp_path / "conf", "gpt_config.yaml", NEMO)
    options = read_trainer(script).options
    assert [options[name] for name in ("tp", "micro_batch", "precision")] == [2, 2, "bf16"]


def test_what_is_off_makes_other_keys_idle(tmp_path: Path) -> None:
    """Of NeMo 1: a format of fp8 beside fp8: false, and what the host would keep."""
    path = written(tmp_path, "nemo.yaml", NEMO)
    reading = read_trainer(path)
    assert reading.options["precision"] == "fp16"
    assert not reading.missing
    path.write_text(NEMO.replace("fp8: false", "fp8: true"))
    assert read_trainer(path).options["precision"] == "fp8"


def test_a_tokenizer_says_how_many_words_there_are(tmp_path: Path) -> None:
    """Those of Megatron-LM and of Pai-Megatron-Patch, where no key does."""
    text = "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 2"
    text += " --seq-length 64 --micro-batch-size 1 "
    for flags, words in (
        ("--tokenizer-type Llama2Tokenizer", 32000),
        ("--patch-tokenizer-type Qwen2Tokenizer", 151936),
        ("--patch-tokenizer-type Qwen2Tokenizer --vocab-size 1000", 1000),
        ("", 50304),
    ):
        model = read_trainer(written(tmp_path, "run.sh", text + flags)).options["model"]
        assert model.tree["vocab"] == words, flags


@pytest.mark.parametrize(("nodes", "gpus"), [("", 8), ("2", 16)])
def test_texts_are_compared_in_double_brackets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: str, gpus: int
) -> None:
    """`[[ "$N" > 1 ]]` holds for 2, and not for what nothing sets."""
    script = 'if [[ "$HOW_MANY" > 1 ]]; then NNODES=$HOW_MANY; else NNODES=1; fi\n'
    script += "torchrun --nproc_per_node 8 --nnodes $NNODES train.py --micro-batch-size 1"
    monkeypatch.setenv("HOW_MANY", nodes)
    assert read_trainer(written(tmp_path, "run.sh", script)).options["gpus"] == gpus


def test_the_length_of_a_sequence_is_assumed_where_no_key_says_it(tmp_path: Path) -> None:
    """That of the model, which may be longer than what the data has."""
    text = OF_TRL.replace("max_prompt_length: 512", "")
    assert (
        "sequences as long as the model's"
        in read_trainer(written(tmp_path, "recipe.yaml", text)).assumed
    )
    assert not any(
        "sequences" in words
        for words in read_trainer(written(tmp_path, "both.yaml", OF_TRL)).assumed
    )
