"""What a stack can run: said by its file, taken by what is chosen, named where it is lacking."""

import re
from itertools import product
from pathlib import Path

import pytest

from co2sim import Question
from co2sim.catalog import load_stack, names
from co2sim.common.errors import Co2simError
from co2sim.models.operators import NARROW
from co2sim.prediction.choose import choose
from co2sim.prediction.driver import run
from co2sim.schedule.mesh import Mesh
from co2sim.schedule.schedule import DType
from co2sim.strategies import options_of, parse
from co2sim.studies.candidates import Space, candidates
from co2sim.training.framework import OPERATORS
from co2sim.training.stack import Stack

TITAN = load_stack("torchtitan").value


def lacks(stack: Stack, strategy: str, mesh: Mesh | None = None) -> str:
    """Of a strategy as users write it."""
    made = parse(strategy)
    return stack.lacks(made.name, options_of(made), mesh or Mesh())


KNOWN = [name for name in names("stacks") if name != "unknown"]
"""Of the other nothing is known but its speed."""


@pytest.mark.parametrize("name", KNOWN)
def test_a_stack_names_strategies_and_values_that_there_are(name: str) -> None:
    """Each text, with any of the values that it allows, is a strategy that the stack then has."""
    stack = load_stack(name).value
    assert stack.runs
    for text in (text for each in stack.runs for text in each.strategies):
        strategy, _, options = text.partition(":")
        pairs = [part.partition("=")[::2] for part in options.split(",") if part]
        for values in product(*(values.split("|") for _, values in pairs)):
            chosen = ",".join(f"{key}={v}" for (key, _), v in zip(pairs, values, strict=True))
            assert not lacks(stack, f"{strategy}:{chosen}")
    assert set(stack.precisions) <= {*map(str, DType), *NARROW}
    assert set(stack.recomputes) <= {"none", "selective", "full", "full/K", *OPERATORS}


@pytest.mark.parametrize("name", KNOWN)
def test_a_stack_says_where_that_is_from(name: str) -> None:
    """Each list has a source, or says that it is assumed."""
    facts = load_stack(name).facts
    of = re.compile(r"(runs\..*|precisions|recomputes|offloads)$")
    said = [fact for fact in facts if of.match(fact.path)]
    assert said
    assert all(fact.source for fact in said)


def test_torchtitan_has_fsdp_and_no_zero() -> None:
    """DDP alone, FSDP2 in fp32 on meshes that divide the sequence, too, and local updates in it."""
    line = Mesh(pp=2)
    for strategy, mesh in (
        ("fsdp", Mesh(tp=8, sequence_parallel=True, pp=4)),
        ("fsdp:shard=node", Mesh()),
        ("co2:worker=node,inner=fsdp", Mesh(tp=2, sequence_parallel=True)),
    ):
        assert not lacks(TITAN, strategy, mesh)
    for strategy, mesh in (
        ("ddp", Mesh(tp=2)),
        ("fsdp", Mesh(tp=2)),
        ("zero1", Mesh()),
        ("fsdp:reduce=bf16", Mesh()),
        ("co2:worker=node", Mesh()),
        ("co2:worker=node,inner=fsdp", line),
    ):
        assert lacks(TITAN, strategy, mesh)


def test_gradients_of_weights_come_later_only_where_a_stack_has_that() -> None:
    """PyTorch has ZB-V and interleaved ZB-H1, without torch.compile; Megatron-LM has neither."""
    eager, colossal, core = (
        load_stack(name).value for name in ("torchtitan-eager", "colossalai", "megatron-core")
    )
    in_v = Mesh(pp=4, schedule="zbv")
    late, turns = Mesh(pp=4, schedule="zb_h1"), Mesh(pp=4, schedule="zb_h1", interleave=2)
    assert not lacks(eager, "fsdp", in_v)
    assert not lacks(eager, "fsdp", turns)
    assert not lacks(colossal, "zero1", in_v)
    for stack, strategy, mesh in (
        (eager, "fsdp", late),
        (colossal, "zero1", late),
        *((core, "zero1", mesh) for mesh in (in_v, late, turns)),
        *((TITAN, "fsdp", mesh) for mesh in (in_v, late, turns)),
        *((stack, "fsdp", Mesh(pp=4, schedule="dualpipe")) for stack in (eager, TITAN)),
    ):
        assert f"schedule={mesh.schedule}" in lacks(stack, strategy, mesh)


def test_a_choice_is_one_that_the_stack_can_run() -> None:
    """The fastest recomputation of another stack, of operators, is none of torchtitan's."""
    by_stack = {}
    for stack in ("torchtitan", "megatron-core"):
        question = Question(
            cluster="dgx-h100",
            model="llama3-8b",
            strategy="fsdp",
            gpus=64,
            stack=stack,
            micro_batch="auto",
            recompute="auto",
            global_batch=512,
        )
        by_stack[stack] = choose(question)[0].recompute
        assert load_stack(stack).value.recomputes_by(by_stack[stack])
    assert not TITAN.recomputes_by("norms+activation")


def test_what_is_asked_and_lacking_is_answered_and_said() -> None:
    """One note a thing: the strategy, the precision, the recomputation."""
    question = Question(
        cluster="dgx-h100",
        model="llama3.2-1b",
        strategy="zero1",
        gpus=8,
        precision="fp16",
        recompute="norms+activation",
        overrides={"stack.keep_gathered": "false"},
    )
    lacking = question.job().lacks()
    assert [any(what in text for text in lacking) for what in ("zero1", "fp16", "norms")] == [
        True
    ] * 3
    result = run(question)
    assert all(any(text in note for note in result.notes) for text in lacking)
    assert (
        not Question(cluster="dgx-h100", model="llama3.2-1b", strategy="fsdp", gpus=8).job().lacks()
    )


@pytest.mark.parametrize("name", names("stacks"))
def test_a_plan_tries_what_the_stack_can_run(name: str) -> None:
    """Unless it is asked for others: strategies, what GPUs divide, and recomputations."""
    stack = load_stack(name).value
    job = Question(cluster="", model="gpt2-small", strategy="", stack=name, global_batch=64)
    space = Space(job=job, clusters=("dgx-h100",), gpus=[16])
    setups = candidates(space).setups
    assert setups
    for setup in setups:
        strategy = setup.case.parsed
        assert not stack.lacks(strategy.name, options_of(strategy), setup.case)
        assert all(map(stack.recomputes_by, setup.recomputes))
    asked = Space(job=job, clusters=("dgx-h100",), gpus=[16], strategies=("zero3",))
    assert candidates(asked).setups


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('[[runs]]\nstrategies = ["zero4"]', "did you mean"),
        ('[[runs]]\nstrategies = ["fsdp:verson=1"]', "'version'"),
        ('recomputes = ["ful"]', "did you mean"),
        ('[[runs]]\nstrategies = ["ddp"]\ndivides = ["dp"]', "divides"),
        ('[[runs]]\nstrategies = ["ddp"]\nschedules = ["zb"]', "schedules"),
    ],
)
def test_what_a_stack_cannot_run_is_refused_in_a_file_of_ones_own(
    tmp_path: Path, line: str, words: str
) -> None:
    """A name that there is not, in one line."""
    mine = tmp_path / "mine.toml"
    numbers = 'name = "mine"\nflash = "flash2"\nelementwise = 2\ncall_overhead = "9 us"'
    mine.write_text(f"{numbers}\n{line}\n")
    question = Question(
        cluster="dgx-h100", model="gpt2-small", strategy="ddp", gpus=8, stack=str(mine)
    )
    with pytest.raises(Co2simError, match=words) as caught:
        question.job()
    assert "\n" not in str(caught.value)


def test_what_a_stack_has_instead_is_named() -> None:
    """The options that differ in its nearest way, with their values, and no others."""
    stack = load_stack("huggingface").value
    text = lacks(stack, "fsdp:version=1,sync=every")
    assert text == "fsdp only with sync=last (not every)"
