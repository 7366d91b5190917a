"""The published equations, written down plainly: one process, NumPy in float64, no shared code.

`local(worker, x, t)` gives x_{t,tau} of a worker: where its local steps of round t lead from x. All
functions give, for every t, what every worker holds after round t: rounds x workers x elements.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from local_problem import RATE, network, optimizer, set_vector, train, vector
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Local = Callable[[int, Vector, int], Vector]


def co2(  # noqa: PLR0913 - the symbols of the algorithm
    x0: Vector,
    local: Local,
    workers: int,
    rounds: int,
    *,
    beta: float,
    alpha: float,
    k: int = 1,
    gap: str = "constant",
    penalty: float = 1.0,
    phi: float | None = None,
    seen: list[Any] | None = None,
    held: Callable[[Vector], Vector] = lambda x: x,
) -> Vector:
    """CO2 with staleness k >= 1. `seen` takes (Lambda, clipped elements, |Lambda (u - clip(u))|^2).

    That is of every average used; the last is in squared units of parameters.

    `held` is what the model's type makes of a point.
    """
    x, m = [x0], np.zeros_like(x0)
    displacements: list[Vector] = []
    history = []
    for t in range(rounds):
        used = t - k
        if used >= 0:
            scale = penalty
            if gap == "gap_aware":
                earlier = [alpha * np.linalg.norm(displacements[s]) for s in range(used)]
                scale = 1.0
                if earlier and max(earlier) > 0:
                    scale = 1 + np.linalg.norm(x[t] - x[t - k]) / max(earlier)
            m = beta * m + displacements[used] / scale
            clipped, before = 0, m
            if phi is not None:
                clipped = int((np.abs(m) > phi).sum())
                m = np.clip(m, -phi, phi)
            if seen is not None:
                seen.append((scale, clipped, scale**2 * float(((before - m) ** 2).sum())))
        start = held(x[t])
        displacements.append(np.mean([start - local(i, start, t) for i in range(workers)], axis=0))
        x.append(x[t] - alpha * m)
        history.append([held(x[t + 1])] * workers)
    return np.array(history)


def late_co2(  # noqa: PLR0913 - the symbols of the algorithm
    x0: Vector,
    step: Local,
    workers: int,
    rounds: int,
    *,
    tau: int,
    d: int,
    beta: float = 0.0,
    alpha: float = 1.0,
    keep: float = 1.0,
    predict: float = 0.0,
    phi: float | None = None,
    penalty: float = 1.0,
    fragments: int = 1,
    preview: bool = False,
) -> Vector:
    """CO2 whose averages are used d local steps after their launch, without a restart.

    With `preview` a worker steps alone at the launch; half of what it was wrong by is left when the
    mean has come, and nothing when the next one has.

    `step` makes one local step, the third argument is its number in the run. Fragments are shares
    of the elements; number i launches after step tau (i + 1) // fragments of a round. Its first
    average holds so many steps only: the rest of what would be predicted is kept.
    """
    x, anchor, m = np.array([x0] * workers), x0.copy(), np.zeros_like(x0)
    ends = [len(x0) * (i + 1) // fragments for i in range(fragments)]
    spans = [slice(*pair) for pair in zip([0, *ends], ends, strict=False)]
    alone, apart = np.zeros_like(x), np.zeros_like(x)
    flying: dict[int, tuple[slice, Vector, Vector]] = {}
    history = []

    def momentum(span: slice, moved: Vector) -> Vector:
        new = beta * m[span] + moved / penalty
        return new if phi is None else np.clip(new, -phi, phi)

    for k in range(1, rounds * tau + 1):
        x = np.array([step(i, x[i], k - 1) for i in range(workers)])
        if k - d in flying:
            span, mean, launched = flying.pop(k - d)
            if preview:
                apart[:, span] = (alone[:, span] + alpha * momentum(span, mean)) / 2
            m[span] = momentum(span, mean)
            anchor[span] -= alpha * m[span]
            share = keep + predict * max(0.0, 1 - (k - d) / tau)
            x[:, span] = anchor[span] + share * (x[:, span] - launched) - predict * d / tau * mean
            x[:, span] += apart[:, span]
        for i, span in enumerate(spans):
            if (k - tau * (i + 1) // fragments) % tau == 0:
                moved = anchor[span] + apart[:, span] - x[:, span]
                if preview:
                    alone[:, span] = [-alpha * momentum(span, one) for one in moved]
                    x[:, span] = anchor[span] + apart[:, span] + alone[:, span]
                flying[k] = (span, np.mean(moved, axis=0), x[:, span].copy())
        if k % tau == 0:
            history.append(x)
    return np.array(history)


def slowmo(
    x0: Vector, local: Local, workers: int, rounds: int, *, beta: float, alpha: float, rate: float
) -> Vector:
    """SlowMo as its paper has it, algorithm 1: u in units of gradients, x <- x - alpha rate u."""
    x, u = x0, np.zeros_like(x0)
    history = []
    for t in range(rounds):
        mean = np.mean([local(i, x, t) for i in range(workers)], axis=0)
        u = beta * u + (x - mean) / rate
        x = x - alpha * rate * u
        history.append([x] * workers)
    return np.array(history)


def local_sgd(x0: Vector, local: Local, workers: int, rounds: int) -> Vector:
    """The mean of all models, every round."""
    x = x0
    history = []
    for t in range(rounds):
        x = np.mean([local(i, x, t) for i in range(workers)], axis=0)
        history.append([x] * workers)
    return np.array(history)


def diloco(
    x0: Vector, local: Local, workers: int, rounds: int, *, beta: float, alpha: float
) -> Vector:
    """The outer optimizer is torch's own SGD with Nesterov momentum, in float64."""
    x = torch.from_numpy(x0.copy()).requires_grad_()
    outer = torch.optim.SGD([x], lr=alpha, momentum=beta, nesterov=beta > 0)
    history = []
    for t in range(rounds):
        at = x.detach().numpy().copy()
        gradient = at - np.mean([local(i, at, t) for i in range(workers)], axis=0)
        x.grad = torch.from_numpy(gradient)
        outer.step()
        history.append([x.detach().numpy().copy()] * workers)
    return np.array(history)


def streaming_diloco(  # noqa: C901, PLR0913 - the symbols of the algorithm
    x0: Vector,
    step: Local,
    workers: int,
    rounds: int,
    *,
    tau: int,
    fragments: int,
    d: int,
    keep: float,
    beta: float,
    alpha: float,
) -> Vector:
    """Algorithm 2 of arXiv 2501.18512, on plain shares of the elements."""
    x, anchor, m = [x0] * workers, x0.copy(), np.zeros_like(x0)
    ends = [len(x0) * (i + 1) // fragments for i in range(fragments)]
    spans = [slice(*pair) for pair in zip([0, *ends], ends, strict=False)]
    starts = [tau * (i + 1) // fragments for i in range(fragments)]
    flying: dict[tuple[int, int], Vector] = {}
    history = []
    for k in range(1, rounds * tau + 1):
        x = [step(i, x[i], k - 1) for i in range(workers)]

        def use(k: int, x: list[Vector]) -> None:
            for p, span in enumerate(spans):
                if (k - d, p) in flying:
                    mean = flying.pop((k - d, p))
                    m[span] = beta * m[span] + mean
                    anchor[span] -= alpha * (mean + beta * m[span])
                    for one in x:
                        one[span] = keep * one[span] + (1 - keep) * anchor[span]

        x = [one.copy() for one in x]
        if d:
            use(k, x)
        for p, span in enumerate(spans):
            if (k - starts[p]) % tau == 0:
                flying[k, p] = np.mean([anchor[span] - one[span] for one in x], axis=0)
        if not d:
            use(k, x)
        if k % tau == 0:
            history.append(x)
    return np.array(history)


def overlap_local_sgd(
    x0: Vector, local: Local, workers: int, rounds: int, *, pull: float, b: float
) -> Vector:
    """Models of workers differ; the anchor's average is used a round late."""
    models = [x0] * workers
    z, v, late = x0, np.zeros_like(x0), None
    history = []
    for t in range(rounds):
        moved = [local(i, models[i], t) for i in range(workers)]
        if late is not None:
            v = b * v + (late - z)
            z = z + v
        models = [(1 - pull) * one + pull * z for one in moved]
        late = np.mean(models, axis=0)
        history.append(models)
    return np.array(history)


def steps_of(
    tau: int, inner: str, workers: int, dtype: torch.dtype = torch.float32
) -> tuple[Vector, Local]:
    """x_0, and tau plain steps of a torch optimizer for every worker of the problem."""
    models = [network(dtype) for _ in range(workers)]
    optimizers = [optimizer(model, inner) for model in models]

    def local(worker: int, x: Vector, t: int) -> Vector:
        set_vector(models[worker], torch.from_numpy(x))
        train(models[worker], optimizers[worker], worker, range(t * tau, (t + 1) * tau))
        return vector(models[worker]).double().numpy()

    return vector(network(dtype)).double().numpy(), local


def case(
    algorithm: str, inner: str = "sgd", model: str = "float32", rounds: int = 6, **options: Any
) -> dict[str, Any]:
    """A case for ranks and for `expected`."""
    options.setdefault("bucket_mib", 1e-4)
    if algorithm == "CO2" and "delay" not in options:
        options = {"outer_momentum": 0.5, "outer_lr": 1.0, "gap": "gap_aware", **options}
    return {
        "algorithm": algorithm,
        "inner": inner,
        "rounds": rounds,
        "model": model,
        "options": options,
    }


_SYMBOLS = {
    "tau": "tau",
    "delay": "d",
    "keep": "keep",
    "predict": "predict",
    "clip": "phi",
    "fragments": "fragments",
    "preview": "preview",
    "penalty": "penalty",
    "outer_lr": "alpha",
    "outer_momentum": "beta",
    "staleness": "k",
    "gap": "gap",
    "pull": "pull",
    "anchor_momentum": "b",
}
_AT_ONCE = {
    "LocalSGD": local_sgd,
    "DiLoCo": diloco,
    "OverlapLocalSGD": overlap_local_sgd,
}


def expected(problem: dict[str, Any], workers: int, seen: list[Any] | None = None) -> Vector:
    """What the published equations give for a case, which has to move."""
    name, inner, dtype = problem["algorithm"], problem["inner"], getattr(torch, problem["model"])
    symbols = {_SYMBOLS[key]: value for key, value in problem["options"].items() if key in _SYMBOLS}
    late = "d" in symbols
    x0, local = steps_of(1 if late else symbols.pop("tau"), inner, workers, dtype)
    run = (x0, local, workers, problem["rounds"])
    if late:
        history = (streaming_diloco if name == "DiLoCo" else late_co2)(*run, **symbols)
    elif name == "CO2" and symbols.get("k", 1):

        def held(x: Vector) -> Vector:
            return torch.from_numpy(x).float().to(dtype).double().numpy()

        history = co2(*run, **symbols, seen=seen, held=held)
    elif name in {"CO2", "SlowMo"}:
        momentum = {key: symbols[key] for key in ("beta", "alpha")}
        history = slowmo(*run, **momentum, rate=RATE[inner])
    else:
        history = _AT_ONCE[name](*run, **symbols)
    assert np.abs(history - history[0]).max() > 0.01, f"{problem} does not move"
    return history


CLOSE = 2e-6
"""What float32 may be off after 6 rounds in which elements move by 0.1 to 1."""


def check(answer: dict[str, Any], problem: dict[str, Any], wanted: Vector, seen: list[Any]) -> None:
    """Whether a rank `followed` the equations: models, and where CO2 has `seen` them its stats."""
    history, rounds = np.array(answer["history"]), problem["rounds"]
    np.testing.assert_allclose(history, wanted, rtol=0, atol=CLOSE, err_msg=str(problem))
    assert answer["counts"] == [rounds, rounds * problem["options"]["tau"]]
    if not seen:
        return
    staleness, beta = problem["options"].get("staleness", 1), problem["options"]["outer_momentum"]
    lambdas = [1.0] * staleness + [scale for scale, *_ in seen]
    assert staleness > 1 or max(answer["penalties"]) <= (1 + 1 / (1 - beta)) * (1 + 1e-5)
    np.testing.assert_allclose(answer["penalties"], lambdas, rtol=1e-4, err_msg=str(problem))
    share = sum(clipped for _, clipped, _ in seen) / (len(seen) * history.shape[-1])
    removed = sum(squares for *_, squares in seen)
    assert answer["clipped"] == pytest.approx(share), problem
    assert answer["residual"] == pytest.approx(removed, rel=1e-3), problem
    if "clip" in problem["options"]:
        assert 0.01 < share < 0.9, f"{problem} clips {share}"
