"""What is trained: data, models, the schedule of the learning rate, and what may be asked."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from co2sim.catalog import load_model
from co2sim.common.delayed_averaging import SHORTEST
from co2sim.common.errors import CatalogError, OptionError
from co2sim.schedule.schedule import Layout
from co2sim.strategies.co2 import CO2
from realrun.train import folder, log
from realrun.train.log import Log, LogRow, draw
from realrun.train.settings import TrainSettings, check
from realrun.train.tasks.presets import GPTS, VOCABULARY, GPTShape
from realrun.train.tasks.task import Task, loss_of
from realrun.train.tasks.text import CHARACTERS, GPT, UNKNOWN, corpus, encode, text

CPU = torch.device("cpu")
SHAPE = GPTShape(layers=2, hidden=16, heads=2, context=24)


@pytest.fixture(scope="module")
def task() -> Task:
    """Task text with a very small model."""
    return text(SHAPE, CPU)


def test_text_of_ascii_survives_encoding() -> None:
    """Printable ASCII, newline and tab come back; everything else is one unknown character."""
    kept = "".join(map(chr, range(32, 127))) + "\n\t"
    assert "".join(CHARACTERS[code] for code in encode(kept)) == kept
    others = "\0\r\x7f\x80é€𝄞"
    assert set(encode(others).tolist()) == {UNKNOWN}
    assert len(encode(others)) == len(others)
    assert encode(kept).max() < UNKNOWN < VOCABULARY


def test_files_are_either_for_training_or_held_out(tmp_path: Path) -> None:
    """Whole files, by name; what is about the machine is left out."""
    for number in range(25):
        (tmp_path / f"m{number:02}.py").write_text(f"number = {number:02}\n")
    (tmp_path / "_sysconfigdata__linux_.py").write_text("secret\n")
    (tmp_path / "notes.txt").write_text("no\n")
    found = corpus(tmp_path)
    assert found.validation_files == ("m09.py", "m19.py")
    assert not set(found.train_files) & set(found.validation_files)
    assert len(found.train_files) == 23
    assert found.validation.tolist() == encode("number = 09\nnumber = 19\n").tolist()
    names = [f"number = {n:02}\n" for n in range(25) if n not in {9, 19}]
    assert found.train.tolist() == encode("".join(names)).tolist()


def test_without_sources_one_line_says_so(tmp_path: Path) -> None:
    """An interpreter may come without them."""
    with pytest.raises(OptionError, match="standard library"):
        corpus(tmp_path)


def test_validation_is_fixed_and_of_held_out_files(task: Task) -> None:
    """Windows at even distances, all of them of the held-out characters."""
    held = corpus().validation.tobytes()
    for one, other in zip(task.validation, text(SHAPE, CPU).validation, strict=True):
        assert torch.equal(one.inputs, other.inputs)
    rows = torch.cat([batch.inputs for batch in task.validation])
    assert rows.numel() <= 32_768
    assert len(rows) == 32_768 // SHAPE.context
    for row in rows[:: len(rows) // 20]:
        assert row.numpy().astype(np.uint8).tobytes() in held


def test_parameters_are_counted_alike_by_torch_formula_and_co2sim(tmp_path: Path) -> None:
    """So that what is predicted is what is trained; also through the file of --describe."""
    for name in GPTS:
        shape = GPTS[name]
        with torch.device("meta"):
            counted = sum(parameter.numel() for parameter in GPT(shape).parameters())
        path = tmp_path / "model.toml"
        path.write_text(shape.toml())
        described = load_model(str(path)).value
        assert counted == shape.parameters == shape.model().parameters == described.parameters
        assert described.blocks == shape.model().blocks
        assert described.tokens == shape.context


def test_an_untrained_model_knows_nothing(task: Task) -> None:
    """The first loss is that of a uniform guess among the vocabulary."""
    torch.manual_seed(0)
    model = task.model()
    loss = loss_of(model, task.batch(0, 1, 32)).item()
    assert loss == pytest.approx(math.log(VOCABULARY), abs=0.15)


def test_later_characters_do_not_change_earlier_logits() -> None:
    """The GPT is causal: nothing of the answer leaks into the question."""
    torch.manual_seed(0)
    model = GPT(SHAPE)
    characters = torch.randint(VOCABULARY, (2, SHAPE.context))
    changed = characters.clone()
    place = SHAPE.context // 2
    changed[:, place] = (changed[:, place] + 1) % VOCABULARY
    one, other = model(characters), model(changed)
    assert torch.equal(one[:, :place], other[:, :place])
    assert (one[:, place:] != other[:, place:]).any(dim=2).all()


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an extra."""
    monkeypatch.setattr("realrun.train.settings.find_spec", lambda _: None)
    with pytest.raises(OptionError, match=r"pip install '\.\[train\]'"):
        check(TrainSettings(task="digits"), Layout(1, 1))


def test_the_learning_rate_rises_and_falls() -> None:
    """Linear to `lr` at the end of warm-up, half a cosine to `final_lr` of it at the end."""
    settings = TrainSettings(steps=100, warmup=10, lr=2.0, final_lr=0.1)
    rates = [settings.learning_rate(step) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == max(rates) == 2.0
    assert rates[54] == pytest.approx((2.0 + 0.2) / 2)
    assert rates[-1] == pytest.approx(0.2)
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert TrainSettings(steps=10, warmup=0, lr=1.0).learning_rate(10) == pytest.approx(0.1)


def test_local_updates_are_validated_at_ends_of_rounds() -> None:
    """At the first one at or after every multiple of `eval_every`, and at the last step."""
    settings = TrainSettings(strategy="co2.published:tau=12", steps=100, eval_every=20)
    rounds = [None if s % 12 else s - 12 for s in range(1, 101)]
    assert evaluated(settings, rounds) == [24, 48, 60, 84, 100]
    plain, steps = TrainSettings(steps=50, eval_every=20), list(range(50))
    assert evaluated(plain, steps) == [20, 40, 50]
    assert evaluated(replace(plain, eval_every=0), steps) == [50]


def evaluated(settings: TrainSettings, began: Sequence[int | None]) -> list[int]:
    """Steps with a validation; of each step, the one before the round that it ends."""
    return [s for s, start in enumerate(began, start=1) if settings.evaluates(s, start)]


def test_the_tau_that_was_measured_stands_for_auto() -> None:
    """In the settings that later commands read; other strategies are as they were."""
    auto = TrainSettings(strategy="co2:keep=0.5")
    assert auto.chosen(7).parsed == CO2(tau=7, keep=0.5)
    assert auto.chosen(None).round == SHORTEST
    fixed = TrainSettings(strategy="co2:tau=3")
    assert fixed.chosen(7) is fixed


ROWS = (
    LogRow(step=10, tokens=100, seconds=0.5, train_loss=4.0, lr=1e-3),
    LogRow(step=20, tokens=200, seconds=1.0, train_loss=3.0, lr=1e-3, rounds=2, penalty=1.5),
    LogRow(step=30, tokens=300, seconds=1.25, train_loss=2.5, lr=1e-3, validation_loss=2.75),
)


def test_a_row_is_on_the_disk_once_it_is_added(tmp_path: Path) -> None:
    """And comes back as it was; a line that was torn off in the middle is left out."""
    kept = Log(tmp_path)
    for count, row in enumerate(ROWS, start=1):
        kept.add(row)
        assert log.read(tmp_path) == ROWS[:count]
    kept.fill(10, 3.75, 0.5)
    kept.close()
    filled = replace(ROWS[0], validation_loss=3.75, accuracy=0.5)
    assert log.read(tmp_path) == (filled, *ROWS[1:])
    with (tmp_path / folder.LOG).open("a") as file:
        file.write("40,400,1.5,2.")
    assert log.read(tmp_path) == (filled, *ROWS[1:])
    (tmp_path / folder.LOG).write_text("something\nelse\n")
    with pytest.raises(CatalogError, match="log of a training"):
        log.read(tmp_path)


@pytest.mark.slow
def test_figures_are_drawn() -> None:
    """A PNG of one run, and of two."""
    for names in (("a",), ("a", "b")):
        picture = draw(dict.fromkeys(names, ROWS), "title")
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 10_000
