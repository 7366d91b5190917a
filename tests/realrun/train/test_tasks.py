"""What is learned: drawn alike by any number of ranks, and learned."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from ranks import realrun_on_ranks
from scipy.spatial import cKDTree

from realrun.train.log import read
from realrun.train.settings import UNITS, TrainSettings
from realrun.train.tasks.images import CLASSES, SIDE, canvas, split_images
from realrun.train.tasks.point_clouds import SURFACES
from realrun.train.tasks.presets import VOCABULARY
from realrun.train.tasks.registry import make_task
from realrun.train.tasks.task import LEFT_OUT, Task, chamfer, loss_of, means, scores
from realrun.train.tasks.text import MASK, SHARE, hide, turned

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=UNITS)
def task(request: pytest.FixtureRequest) -> Task:
    """Each of the tasks, with its smallest model."""
    chosen = TrainSettings(task=request.param, size="tiny")
    return make_task(chosen.task, chosen.size, chosen.shape, CPU)


def test_any_number_of_ranks_sees_the_same_samples(task: Task) -> None:
    """And so does a run that was resumed; another seed and another step see others."""
    whole = task.batch(3, 7, 8)
    parts = [task.batch(3, 7, 8, part, 4) for part in range(4)]
    for place, all_ in enumerate(whole):
        assert torch.equal(torch.cat([part[place] for part in parts]), all_)
    for other in (task.batch(4, 7, 8), task.batch(3, 8, 8)):
        assert not torch.equal(other.inputs, whole.inputs)


def test_scores_are_sums_of_the_loss(task: Task) -> None:
    """Over the places that are asked for; only points have no accuracy."""
    torch.manual_seed(0)
    model, batch = task.model(), task.validation[0]
    with torch.no_grad():
        loss, accuracy = means(scores(model, batch))
        assert loss == pytest.approx(loss_of(model, batch).item(), rel=1e-4)
    assert (accuracy is None) == (task.name == "points")
    if accuracy is not None:
        asked = batch.targets != LEFT_OUT
        named = (model(batch.inputs).argmax(-1) == batch.targets)[asked]
        assert accuracy == pytest.approx(named.double().mean().item())


# --- masked text ---------------------------------------------------------------------------------


def test_as_many_characters_are_hidden_in_each_sample() -> None:
    """15 %, of which 8 in 10 are hidden, one is any other, and one stays; by number."""
    numbers = np.arange(400)
    characters = np.random.default_rng(0).integers(VOCABULARY, size=(400, 64))
    inputs, targets = (part.numpy() for part in hide(numbers, characters))
    asked = targets != LEFT_OUT
    assert set(asked.sum(1)) == {round(SHARE * 64)}
    assert np.array_equal(targets[asked], characters[asked])
    assert np.array_equal(inputs[~asked], characters[~asked])
    hidden, same = inputs[asked] == MASK, inputs[asked] == characters[asked]
    assert hidden.mean() == pytest.approx(0.8, abs=0.02)
    assert same.mean() == pytest.approx(0.1 + 0.1 / VOCABULARY, abs=0.02)
    alone = hide(numbers[7:8], characters[7:8])
    assert np.array_equal(alone.inputs.numpy()[0], inputs[7])


def test_what_a_place_sees_depends_on_distances_alone() -> None:
    """Products of turned queries and keys are the same wherever both stand; lengths stay."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 8).expand(2, 24, 8)
    products = turned(query) @ turned(key).T
    for distance in (-5, 0, 1, 9):
        same = products.diagonal(distance)
        assert torch.allclose(same, same[0].expand_as(same), atol=1e-5)
    assert not torch.allclose(products.diagonal(1), products.diagonal(2)[0], atol=1e-2)
    assert torch.allclose(turned(query).norm(dim=1), query.norm(dim=1), atol=1e-5)


# --- segmentation --------------------------------------------------------------------------------


def test_pixels_with_ink_have_the_class_of_their_digit() -> None:
    """All others are background; two to four digits lie apart."""
    found = split_images()
    for number in range(20):
        shades, classes = canvas(found.train, found.train_labels, (8, number))
        assert shades.shape == classes.shape == (SIDE, SIDE)
        assert set(np.unique(classes)) <= set(range(CLASSES))
        assert (shades[classes > 0] >= 0.25).all()
        assert shades.min() >= 0
        assert 2 <= len(set(np.unique(classes)) - {0}) + _repeated(classes) <= 4


def _repeated(classes: np.ndarray) -> int:
    """Digits of a class beyond its first: at most one lies in each quarter."""
    half = SIDE // 2
    quarters = classes.reshape(2, half, 2, half).transpose(0, 2, 1, 3).reshape(4, -1)
    there = [set(np.unique(quarter)) - {0} for quarter in quarters]
    assert all(len(one) <= 1 for one in there)
    return sum(map(len, there)) - len(set().union(*there))


# --- points --------------------------------------------------------------------------------------


def test_the_chamfer_distance_is_that_of_a_tree_of_neighbours() -> None:
    """Squares of the distances to the nearest point, mean over the points, both ways."""
    torch.manual_seed(0)
    one, other = torch.rand(3, 20, 3), torch.rand(3, 30, 3)
    for a, b, found in zip(one, other, chamfer(one, other), strict=True):
        there, _ = cKDTree(b.numpy()).query(a.numpy())
        back, _ = cKDTree(a.numpy()).query(b.numpy())
        assert found.item() == pytest.approx((there**2).mean() + (back**2).mean(), rel=1e-5)
    assert torch.equal(chamfer(one, other), chamfer(other, one))
    assert chamfer(one, one[:, torch.randperm(20)]).abs().max() == 0


def test_points_lie_on_their_surface() -> None:
    """The implicit equation of each holds."""
    for name in SURFACES:
        u, v = np.random.default_rng(0).random((2, 200))
        f = 0.7
        x, y, z = SURFACES[name](u, v, f)
        r = np.hypot(x, y)
        left: dict[str, Any] = {
            "ellipsoid": r**2 + (z / f) ** 2 - 1,
            "torus": (r - 1) ** 2 + z**2 - (f / 2) ** 2,
            "cylinder": r - f,
            "cone": r / f - (z + 1) / 1.5,
            "saddle": f * (x**2 - y**2) - z,
            "helicoid": x * np.sin(np.pi * (z / f + 1)) - y * np.cos(np.pi * (z / f + 1)),
        }
        assert abs(left[name]).max() < 1e-12


# --- as a user -----------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.dist
@pytest.mark.parametrize("name", ["masked_text", "segmentation", "points"])
def test_the_command_trains_every_task(name: str, tmp_path: Path) -> None:
    """On two ranks with CO2; the log has an accuracy where places have classes."""
    options = f"-t {name} --size tiny --steps 8 --batch 4 --warmup 2 -o o -s co2.published:tau=2"
    done = realrun_on_ranks(tmp_path, 2, "train", *options.split())
    assert done.returncode == 0, done.stderr
    last = read(tmp_path / "o")[-1]
    assert last.step == 8
    assert last.validation_loss is not None
    assert (last.accuracy is None) == (name == "points")
    assert ("accuracy" in done.stdout) == (name != "points")
    assert f"{UNITS[name]}s/s" in done.stdout
