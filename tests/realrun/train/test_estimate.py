"""Estimates of the constants of the bound, beside functions whose constants are known."""

import json
import math
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import on_ranks, realrun_on_ranks
from torch import Tensor, nn

from analysis.cli import main as co2analysis
from co2sim.strategies import LocalSteps, parse, with_options
from realrun.train.constants import Estimate, Estimates, Point, commands, limits, moments
from realrun.train.estimate import RankLoss, measure
from realrun.train.settings import TrainSettings
from realrun.train.tasks.task import Batch, loss_of

PLAIN: dict[str, Any] = {
    "optimizer": "sgd",
    "momentum": 0.0,
    "weight_decay": 0.0,
    "clip_grad": 0.0,
}
TINY = ("train", "--size", "tiny", "--context", "16", "--batch", "8")


# --- from gradients to sigma^2, zeta^2 and |grad f|^2 -------------------------------------------


def test_moments_are_unbiased_and_know_their_errors() -> None:
    """Means of 1,500 estimates are the truth; jackknife errors are those seen, or larger.

    Three workers, five batches, noise that differs between coordinates and workers. The factor by
    which errors are too large, where all workers are alike, is the one in the docstring.
    """
    for spread in [0.0, 1.0]:
        rng = np.random.default_rng(3)
        workers, batches, size, times = 3, 5, 12, 1500
        scales = rng.uniform(0.2, 2.0, (workers, 1, size))
        slopes = rng.standard_normal(size) + spread * rng.standard_normal((workers, 1, size))
        truth = (
            (scales**2).sum() / workers,
            ((slopes - slopes.mean(0)) ** 2).sum() / workers,
            (slopes.mean(0) ** 2).sum(),
        )
        found = []
        for _ in range(times):
            drawn = slopes + scales * rng.standard_normal((workers, batches, size))
            shared = drawn.mean(0)
            found.append(moments(np.mean([g @ g.T for g in drawn], 0), shared @ shared.T))
        for number, expected in enumerate(truth):
            values = np.array([one[number].value for one in found])
            errors = np.array([one[number].error for one in found])
            assert abs(values.mean() - expected) < 4 * values.std() / math.sqrt(times)
            ratio = math.sqrt((errors**2).mean()) / values.std()
            most = math.sqrt(2 * (batches - 1) / (batches - 2))
            assert 0.95 < ratio < 1.05 * most
            assert ratio > 0.95 * most or (number, spread) != (1, 0.0)


# --- one rank -----------------------------------------------------------------------------------


def test_curvature_is_the_largest_eigenvalue_of_the_whole_hessian() -> None:
    """Of a network of 51 parameters: the dense Hessian, by other means, agrees."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]
    generator = torch.Generator().manual_seed(1)
    batches = [
        Batch(
            torch.randn(32, 1, 4, generator=generator),
            torch.randint(3, (32, 1), generator=generator),
        )
        for _ in range(5)
    ]
    parameters, same = list(model.parameters()), lambda tensor: tensor
    alone = RankLoss(parameters, lambda step: loss_of(model, batches[step]), same, same)
    point, gradient = measure(alone, 0, 4)

    def flat_loss(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        given = {n: p.view(s) for n, p, s in zip(names, parts, shapes, strict=True)}
        logits = torch.func.functional_call(model, given, (batches[0].inputs,))
        return nn.functional.cross_entropy(logits[:, 0], batches[0].targets[:, 0])

    here = torch.cat([p.detach().flatten() for p in model.parameters()])
    hessian = torch.autograd.functional.hessian(flat_loss, here)
    assert point.curvature == pytest.approx(
        float(np.abs(np.linalg.eigvalsh(hessian.numpy())).max()), rel=5e-3
    )
    (slope,) = torch.autograd.grad(flat_loss(here.requires_grad_()), here)
    assert torch.allclose(gradient, slope, atol=1e-6)


# --- ranks --------------------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.parametrize("strategy", ["ddp", "local_sgd:tau=2"])
def test_two_workers_on_a_quadratic(strategy: str) -> None:
    """Every rank is a worker, with steps of its own or without; all find the same."""
    on_ranks("check_estimates", 2, module="noisy_quadratic", strategy=strategy)


@pytest.mark.nightly
@pytest.mark.dist
@pytest.mark.parametrize(
    "strategy",
    ["ddp", "zero1", "co2.published:tau=4", "co2:tau=4,delay=2", "overlap_local_sgd:tau=2"],
)
def test_estimates_do_not_disturb_the_training(strategy: str) -> None:
    """All losses of all steps are the same bits as without."""
    on_ranks("check_undisturbed", 2, module="noisy_quadratic", strategy=strategy)


# --- what is made of them -----------------------------------------------------------------------


def point(step: int, losses: tuple[float, ...], noise: float, spread: float) -> Point:
    """A point with some values."""
    return Point(
        step=step,
        losses=losses,
        gradient=Estimate(1.0, 0.1),
        noise=Estimate(noise, 0.1),
        heterogeneity=Estimate(spread, 0.2),
        curvature=3.0 + step,
        elsewhere=Estimate(2.0, 0.1),
        iterations=5,
        change=1e-3,
        along_step=9.0 if step == 4 else None,
    )


FOUND = Estimates(
    workers=2,
    samples=8,
    micro_batch=4,
    points=(
        point(0, (4.0, 4.2, 4.1), 2.0, -0.5),
        point(4, (3.0, 3.3, 3.2), 5.0, -0.1),
        point(7, (3.5, 3.5, 3.5), 1.0, -0.3),
    ),
)


def test_the_bound_gets_the_largest_of_all_points() -> None:
    """L also from steps; no zeta^2 below 0; the gap from samples that points have in common."""
    assert FOUND.smoothness == 10.0
    assert replace(FOUND, points=FOUND.points[:2]).smoothness == 9.0
    assert FOUND.noise == Estimate(5.0, 0.1)
    assert FOUND.heterogeneity == Estimate(0.0, 0.2)
    falls = [1.0, 0.9, 0.9]
    assert FOUND.gap.value == pytest.approx(np.mean(falls))
    assert FOUND.gap.error == pytest.approx(np.std(falls, ddof=1) / math.sqrt(3))


def test_commands_are_those_of_the_training() -> None:
    """Workers, rounds, tau and delay; numbers with four digits. `tau` chooses tau, no more."""
    for strategy, delay, end in [
        ("ddp", None, "--rounds 24 --local-steps 1 --delay 0"),
        ("local_sgd:tau=4", None, "--rounds 6 --local-steps 4 --delay 0"),
        ("slowmo:tau=48", None, "--rounds 1 --local-steps 48 --delay 0"),
        ("co2.published:tau=4", None, "--rounds 6 --local-steps 4"),
        ("co2.published:tau=4,staleness=2", None, "--local-steps 4 --delay '2 rounds'"),
        ("co2:tau=4,delay=3,keep=0.5", 3, "--local-steps 4 --delay 3 --keep 0.5 --predict 0.5"),
        ("co2:tau=4,delay=auto,keep=0.5", 2, "--delay 2 --keep 0.5 --predict 0.5 --fragments 4"),
        ("co2:tau=12,delay=3,fragments=4", 3, "--keep 0.5 --predict 0.5 --fragments 4"),
    ]:
        lines = commands(FOUND, TrainSettings(strategy=strategy, steps=24), delay)
        assert lines["bound"].startswith(
            "co2analysis bound --smoothness 10 --noise 5 --gap 0.9333 --workers 2 "
        )
        assert lines["bound"].endswith(end)
        rest = " --micro-batch 4 --accumulation 1 --cluster CLUSTER --model MODEL"
        assert lines["tau"].endswith(rest)
        asked = lines["tau"].removesuffix(rest).partition(" --strategy ")[2]
        trained = parse(strategy)
        if not isinstance(trained, LocalSteps):
            assert asked == "co2"
            continue
        said = {"delay": str(delay), "fragments": str(trained.parts())} if delay else {}
        with_tau = f"{asked}{',' if ':' in asked else ':'}tau={trained.tau}"
        assert parse(with_tau) == with_options(trained, said)


def test_what_the_numbers_do_not_cover_is_said() -> None:
    """Whatever is not plain SGD, and strategies that the bound is not about."""
    adaptive = " ".join(limits(TrainSettings(strategy="diloco:tau=4")))
    assert "does not cover AdamW, weight decay 0.01, gradients clipped at 1." in adaptive
    assert "The bound is not about diloco" in adaptive
    heavy = " ".join(limits(TrainSettings(**{**PLAIN, "momentum": 0.9})))
    assert "does not cover momentum 0.9." in heavy
    early = " ".join(limits(TrainSettings(strategy="co2:tau=1,delay=1,preview=true", **PLAIN)))
    assert "The bound is not about a preview" in early
    plain = " ".join(limits(TrainSettings(strategy="slowmo:tau=4", **PLAIN)))
    assert "not cover" not in plain
    assert "not about" not in plain
    assert "zeta^2 is 0" in plain
    assert "for others add --outer-step" in plain
    assert "--outer-step" not in heavy


def test_values_have_the_decimals_of_their_errors() -> None:
    """Two significant figures of the error."""
    for value, error, shown in [
        (0.81234, 0.0131, "0.812 ± 0.013"),
        (4.9, 0.58, "4.90 ± 0.58"),
        (1234.5, 21.0, "1234 ± 21"),
        (1.5e-7, 2e-8, "1.5e-07 ± 2e-08"),
        (3.0, 0.0, "3 ± 0"),
    ]:
        assert str(Estimate(value, error)) == shown


# --- the command --------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.dist
def test_a_training_leaves_estimates_and_commands_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table with all points, estimate.json, and commands that co2analysis takes."""
    more = "--steps 6 --warmup 2 -s co2.published:tau=2 --estimate"
    done = realrun_on_ranks(tmp_path, 2, *TINY, *more.split())
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "estimate.json").read_text())
    assert re.search(r"after step 0 +after step 3 +after step 5 +for the bound", done.stdout)
    assert f"$ {found['commands']['bound']}\n" in done.stdout
    assert f"$ {found['commands']['tau']}\n" in done.stdout
    assert "does not cover AdamW" in done.stdout
    assert found["workers"] == 2
    assert found["samples"] == 4
    assert [one["step"] for one in found["points"]] == [0, 3, 5]
    assert len(found["points"][0]["losses"]) == 8
    assert found["noise"]["value"] > 4 * found["noise"]["error"] > 0
    assert abs(found["points"][0]["heterogeneity"]["value"]) < (
        5 * found["points"][0]["heterogeneity"]["error"]
    )
    tau = found["commands"]["tau"].replace("CLUSTER", "dgx-h100").replace("MODEL", "gpt2-xl")
    for line in (found["commands"]["bound"], f"{tau} --gpus 16 --taus 1,4 --times '1 h'"):
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        with pytest.raises(SystemExit) as ended:
            co2analysis()
        assert not ended.value.code, capsys.readouterr().err
    assert "bound" in capsys.readouterr().out
