"""Studies of benchmarks/: what is run next, given what is there, and what their numbers rest on."""

import importlib
import math
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT

torch = pytest.importorskip("torch", reason="the extra `real` is not installed")

FOLDER = ROOT / "benchmarks"
sys.path.insert(0, str(FOLDER))

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # torch, importing
    import convergence
    import quantization
    import ssp
    import studies
    import time_to_loss as timed
    from ranks import on_ranks

from realrun.algorithms.quantization_format import wire_bytes  # noqa: E402

pytestmark = pytest.mark.slow  # importing them takes seconds


# --- convergence: which runs, in which order -----------------------------------------------------

BUDGET = studies.Budget()


def line(name: str) -> Any:
    """A line of the table of the convergence study."""
    return next(each for each in convergence.configurations() if each.name == name)


def tuned(configuration: Any, best_lr: float, best: int) -> list[Any]:
    """All runs of a line in order, if the loss is least at a rate and at an outer step."""
    rows: dict[Any, Any] = {}
    runs = []
    while missing := [
        run for run in studies.tuned(configuration, BUDGET, rows) if run.key not in rows
    ]:
        runs.append(missing[0])
        wrong = abs(math.log2(missing[0].lr / best_lr))
        wrong += 0.1 * abs(configuration.choices.index(missing[0].choice) - best)
        rows[missing[0].key] = {"validation_loss": 2 + wrong, "error": ""}
    return runs


@given(
    st.sampled_from([each.name for each in convergence.configurations()]),
    st.sampled_from((5e-3, 1e-2, 2e-2, 1.25e-3)),
)
def test_every_line_is_reported_at_its_best(name: str, best: float) -> None:
    """Three seeds, none of them that of the tuning, at the best rate and outer step."""
    runs = tuned(line(name), best, 1)
    last = runs[-3:]
    assert [run.seed for run in last] == list(studies.SEEDS)
    assert {run.seed for run in runs[:-3]} == {studies.TUNING_SEED}
    choices = line(name).choices
    assert {(run.lr, run.choice) for run in last} == {(best, choices[min(1, len(choices) - 1)])}


def test_a_best_rate_at_the_edge_is_looked_beyond() -> None:
    """By factors of 2, twice at most; one inside the grid is not."""
    low, middle, high = studies.RATES
    rates = {
        best: {run.lr for run in tuned(line("AdamW-DDP"), best, 0)} for best in (middle, 1.0, 1e-6)
    }
    assert rates[middle] == {low, middle, high}
    assert rates[1.0] == {low, middle, high, 2 * high, 4 * high}
    assert rates[1e-6] == {low, middle, high, low / 2, low / 4}


@pytest.mark.parametrize("study", ["convergence", "long_study", "bound_ranking", "time_to_loss"])
def test_a_study_makes_its_table_from_its_kept_rows(
    study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines of the tables are those that are kept."""
    for path in (FOLDER / "results").glob(f"{study}*"):
        if path.suffix in {".csv", ".json"}:
            shutil.copy(path, tmp_path)
    monkeypatch.setattr(sys, "argv", [study, "--report", "--out", str(tmp_path)])
    assert importlib.import_module(study).main() == 0

    def cells(path: Path) -> set[str]:
        lines = path.read_text().splitlines()
        return {" ".join(row.split()) for row in lines if row.startswith("| ")}

    kept, made = (cells(folder / f"{study}.md") for folder in (FOLDER / "results", tmp_path))
    assert made
    assert made <= kept
    assert (tmp_path / f"{study}.png").read_bytes()[:4] == b"\x89PNG"


# --- time to a loss ------------------------------------------------------------------------------


def test_the_loss_falls_evenly_between_validations() -> None:
    """The target is crossed on the straight line; at the first validation there is none."""
    points = [(12.0, 1.0, 3.0), (24.0, 5.0, 2.0), (36.0, 6.0, 2.5), (48.0, 7.0, 1.0)]
    assert timed.reached(points, 2.25) == pytest.approx((21.0, 4.0, 2.25))
    assert timed.reached(points, 1.75) == pytest.approx((42.0, 6.5, 1.75))
    assert timed.reached(points, 3.5) == (12.0, 1.0, 3.0)
    assert timed.reached(points, 0.5) is None


def test_a_predicted_step_takes_what_was_calibrated_into_account() -> None:
    """Sending slows only what runs meanwhile; a network that attains 4/5 of its rate is found."""
    step, Calibrated = timed.predicted_step, timed.Calibrated  # noqa: N806 - a class
    place = timed.Place(4, "100 Mbit/s", "mini", 8)
    whole, slow = step(place, "local_sgd:tau=12", Calibrated(0.027)), Calibrated(0.027, 0.1)
    assert step(place, "local_sgd:tau=12", slow) == pytest.approx(whole)
    late = [step(place, "co2:tau=12,delay=4", found) for found in (Calibrated(0.027), slow)]
    average = 12 * (whole - 0.027)
    assert 12 * (late[1] - late[0]) == pytest.approx(0.1 / 1.1 * average, rel=0.02)
    averaging = step(place, "local_sgd:tau=1", Calibrated(0.027, efficiency=0.8))
    assert timed.network_efficiency(place, 0.027, averaging) == pytest.approx(0.8, rel=0.03)
    assert step(place, "local_sgd:tau=12", Calibrated(0.027, messages=0.04)) == 0.04
    for local, least in ((0.025, 4), (0.028, 3)):  # as many steps as an average takes
        chosen = timed.with_delay(place, "co2:tau=12,delay=auto,fragments=1", local)
        assert chosen.delay == least


# --- block sizes of quantization -----------------------------------------------------------------


def received(code: str, x: Any, block: int) -> Any:
    """What arrives of a vector."""
    return quantization.CODES[code].received(x[None], block, torch.Generator().manual_seed(0))[0]


@given(st.integers(0, 1000), st.sampled_from((32, 256, 4096)))
def test_an_adaptive_scale_is_never_worse_in_a_block(seed: int, block: int) -> None:
    """It may choose the usual one; of a normal distribution it chooses a smaller one."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(seed))
    usual, adaptive = ((received(c, x, block) - x).square() for c in ("int4", "int4, adaptive"))
    for one, other in zip(usual.split(block), adaptive.split(block), strict=True):
        assert other.sum() <= one.sum() * (1 + 1e-5)
    assert adaptive.sum() < usual.sum()


@pytest.mark.parametrize(("code", "bits"), [("int4", 4), ("int4, stochastic", 4), ("int8", 8)])
def test_codes_have_the_error_of_uniform_rounding_and_the_bits_of_the_wire(
    code: str, bits: int
) -> None:
    """Elements spread evenly: scale^2 / 12 to nearest, and 1 / 6 of it stochastic."""
    x = 2 * torch.rand(400_000, generator=torch.Generator().manual_seed(1)) - 1
    expected = (1 / (2 ** (bits - 1) - 1)) ** 2 / (6 if "stochastic" in code else 12)
    assert float((received(code, x, 4096) - x).square().mean()) == pytest.approx(expected, rel=0.01)
    sent = 8 * wire_bytes(1 << 16, 4 if bits == 4 else 8, 256) / (1 << 16)
    assert quantization.CODES[code].bits_per_element(256) == sent


@pytest.mark.dist
def test_the_study_codes_as_the_algorithms_do() -> None:
    """Four ranks: the sum of ZeRO++'s gradients, and the mean of an average, bit for bit."""
    calls = {"gradient": {"block": 32}, "outer": {"wire": "int4"}}
    found = {
        name: on_ranks(name, 4, module="quantization_workers", **arguments)
        for name, arguments in calls.items()
    }

    def send(block: int) -> Any:
        return lambda rows: quantization.CODES["int4"].received(rows, block, torch.Generator())

    sent = {name: [torch.tensor(one["given"]) for one in ranks] for name, ranks in found.items()}
    parts = torch.cat([torch.tensor(one["got"]) for one in found["gradient"]])
    assert torch.equal(quantization.reduced(sent["gradient"], send(32)), parts)
    expected = quantization.averaged(sent["outer"], send(2048))
    assert all(torch.equal(torch.tensor(one["got"]), expected) for one in found["outer"])


# --- stale-synchronous parallel training ---------------------------------------------------------


@given(st.data())
@settings(max_examples=30)
def test_no_worker_is_further_ahead_than_the_bound(data: Any) -> None:
    """For any times: each clock is read and arrives once, in order; a larger bound is no slower."""
    workers, bound = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 5))
    rows = st.lists(st.floats(0.01, 5.0), min_size=12, max_size=12)
    seconds = [data.draw(rows) for _ in range(workers)]
    place = ssp.Servers(workers=workers, servers=2, parameter_bytes=0.0)
    course, looser = (ssp.ssp(place, lambda w, c: seconds[w][c], 12, b) for b in (bound, bound + 1))
    assert max(course.staleness()) <= bound
    for what in ("read", "arrived"):
        for worker in range(workers):
            mine = [m.clock for m in course.moments if (m.what, m.worker) == (what, worker)]
            assert mine == list(range(12))
    assert course.seconds >= max(map(sum, seconds)) - 1e-9
    assert looser.seconds <= course.seconds + 1e-9
