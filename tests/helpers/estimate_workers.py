"""What ranks of the tests of estimates do."""

from dataclasses import asdict
from typing import Any

from noisy_quadratic import quadratic
from torch import Tensor, nn

from realrun.execute.world import World
from realrun.train import TrainSettings, estimate, loop, train
from realrun.train.tasks.task import Batch


def on_the_quadratic(world: World, strategies: list[str]) -> dict[str, Any]:
    """What is estimated by training on it with plain SGD."""

    def of(model: nn.Module, batch: Batch) -> Tensor:
        found: Tensor = model(batch.inputs)
        return found

    class Unseen:
        """No validation."""

        last = None

        def __init__(self, *_: object) -> None: ...
        def take(self) -> tuple[float, float]:
            return 0.0, 0.0

        def take_pending(self, _: object) -> None: ...

    kept = loop.make_task, loop.loss_of, estimate.loss_of, loop.Validation
    loop.make_task = lambda *_: quadratic(world.rank)
    loop.loss_of = estimate.loss_of = of
    loop.Validation = Unseen  # type: ignore[assignment, misc]
    found = {}
    try:
        for strategy in strategies:
            settings = TrainSettings(
                strategy=strategy,
                steps=8,
                batch=16,
                optimizer="sgd",
                lr=0.01,
                momentum=0.0,
                weight_decay=0.0,
                clip_grad=0.0,
                warmup=0,
            )
            history = train(settings, world, estimate=True)
            assert history.estimates is not None
            found[strategy] = {
                **history.estimates.to_dict(settings, None),
                "points": [asdict(point) for point in history.estimates.points],
            }
    finally:
        loop.make_task, loop.loss_of, estimate.loss_of, loop.Validation = kept
    return found


def undisturbed(world: World, strategies: list[str]) -> dict[str, bool]:
    """Whether a training with estimates learns the same, to the last bit."""
    found = {}
    for strategy in strategies:
        given: dict[str, Any] = {"size": "tiny", "context": 16, "batch": 8, "log_every": 1}
        settings = TrainSettings(strategy=strategy, steps=9, warmup=2, eval_every=3, **given)
        plain, measured = (train(settings, world, estimate=on) for on in (False, True))
        rows = [
            [(row.step, row.train_loss, row.validation_loss) for row in history.rows]
            for history in (plain, measured)
        ]
        found[strategy] = rows[0] == rows[1] and plain.estimates is None
    return found
