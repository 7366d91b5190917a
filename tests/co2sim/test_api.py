"""What `import co2sim` offers: names, types, conversions, and results that are pleasant to read."""

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import tiny

import co2sim
from co2sim import Noise, OptionError, Question, simulate
from co2sim.common.errors import ScheduleError
from co2sim.prediction.question import OPEN_BATCH
from co2sim.training.workload import Workload

SMALL: dict[str, Any] = {
    "cluster": "a100-tcp80",
    "model": "gpt2-small",
    "strategy": "ddp",
    "gpus": 16,
}


def test_every_public_name_of_the_stub_is_there() -> None:
    """What a type checker sees is what its module has, what is loaded on demand and listed."""
    for name in co2sim.__all__:
        assert getattr(co2sim, name) is getattr(
            sys.modules[f"co2sim.{co2sim._MODULES[name]}"], name
        )
        assert name in dir(co2sim)
    assert {"simulate", "sweep", "Question", "Result"} < set(co2sim.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = co2sim.nothing


@pytest.mark.slow
def test_a_sweep_loads_nothing_heavy() -> None:
    """No library that draws or prints, nor that of several processes, which it does not start."""
    code = (
        "import sys, co2sim\n"
        "co2sim.sweep('dgx-h100', 'gpt2-small', 'ddp', gpus=16, vary={'micro_batch': [1]})\n"
        "print({'matplotlib', 'rich', 'torch', 'joblib', 'altair', 'jinja2'} & set(sys.modules))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"


def test_the_signature_of_simulate_names_every_field_of_a_case() -> None:
    """Shells complete it: every field of Question and of Noise has a keyword, a type and a line."""
    found = inspect.signature(simulate).parameters
    assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in found.values())
    wanted = {f.name for f in fields(Question)} | {f.name for f in fields(Noise)}
    assert set(found) == wanted | {"progress"}
    assert all(p.annotation is not inspect.Parameter.empty for p in found.values())
    defaults = {f.name: f.default for f in fields(Question)} | OPEN_BATCH
    for name in ("micro_batch", "recompute", "optimizer", "fold", "gpus", "rounds", "precision"):
        assert found[name].default == defaults[name]
    documented = inspect.getdoc(simulate) or ""
    assert all(f"    {name}: " in documented for name in found)


@pytest.mark.parametrize(
    ("given", "token"),
    [
        ({"micro_batch": 2.5}, "micro_batch is 2.5"),
        ({"micro_batch": True}, "micro_batch is True"),
        ({"micro_batch": None}, "micro_batch is None"),
        ({"micro_batch": [1, 2]}, "micro_batch is [1, 2]"),
        ({"global_batch": 17}, "multiple of 16 GPUs"),
        ({"global_batch": 0}, "global_batch is 0"),
        ({"global_batch": 16, "accumulation": 2}, "not both"),
        ({"recompute": True}, "recompute is True"),
        ({"fold": 1}, "fold is 1"),
        ({"cluster": 8}, "cluster is 8"),
        ({"model": None}, "model is None"),
        ({"strategy": co2sim.DDP}, "must be a text"),
        ({"strategy": 3}, "strategy is 3"),
        ({"overrides": "nodes=3"}, "overrides is"),
        ({"overrides": {"nodes": [1]}}, "[1]"),
        ({"noise": 0.1}, "noise is 0.1"),
        ({"noise": Noise(jitter=0.1), "seed": 3}, "not both"),
        ({"node_speed": {"first": 0.5}}, "node is 'first'"),
    ],
    ids=lambda one: str(one)[:40],
)
def test_values_that_could_mean_two_things_are_refused(given: dict[str, Any], token: str) -> None:
    """No raw TypeError or AttributeError: one line with what was given, or what is allowed."""
    with pytest.raises(co2sim.Co2simError) as caught:
        simulate(**SMALL | given)
    assert token in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("strategy", "token"),
    [
        (co2sim.Zero2(owners=1), "owners is '1'"),
        (co2sim.CO2(worker=5), "worker is '5'"),
        (co2sim.CO2(worker="node", inner=co2sim.Zero2()), "zero1, zero2"),
        (co2sim.CO2(dtype="fp8"), "dtype is 'fp8'"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_options_of_a_strategy_that_mean_nothing_are_refused(
    strategy: co2sim.Strategy, token: str
) -> None:
    """However a strategy comes in: no KeyError, and no nonsense that is taken for true."""
    asks: list[Callable[[], object]] = [
        lambda: simulate(**SMALL | {"strategy": strategy}),
        lambda: co2sim.sweep(**SMALL | {"strategy": strategy}, vary={"seed": [1]}),
        lambda: co2sim.scale("a100-tcp80", "gpt2-small", strategy, gpus=[8]),
        lambda: Question(**SMALL | {"strategy": strategy}).stage(),
    ]
    for ask in asks:
        with pytest.raises(OptionError) as caught:
            ask()
        assert token in str(caught.value)
        assert "\n" not in str(caught.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks(co2sim.DDP):
    """A strategy of a user that divides by an option without a check."""

    scale_block: int = 1

    def schedule(self, job: Workload, layout: co2sim.Layout) -> co2sim.Schedule:
        """As DDP."""
        assert job.parameters // self.scale_block
        return co2sim.DDP().schedule(job, layout)


def test_an_error_inside_a_strategy_is_one_line_that_says_where() -> None:
    """What fails, with its kind, its file and its line, instead of a traceback."""
    with pytest.raises(ScheduleError, match="scale_block=0") as caught:
        simulate(**SMALL | {"strategy": Blocks(scale_block=0)})
    assert "ZeroDivisionError" in str(caught.value)
    assert "(test_api.py, line " in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_result_shows_a_cost_where_there_is_a_price() -> None:
    """In the currency of the price, in the short form and in the table."""
    found = simulate(tiny.cluster(price_per_gpu=1.0, currency="EUR"), tiny.model(), "ddp")
    cost = f"{found.cost_per_billion_tokens:,.2f} EUR"
    assert f"cost of a billion tokens {cost}" in repr(found)
    assert f">{cost}</td>" in found._repr_html_()


def test_a_result_comes_back_from_its_json() -> None:
    """The short repr hides nothing: JSON still holds every figure."""
    found = simulate(**SMALL)
    assert co2sim.Result.from_dict(json.loads(json.dumps(found.to_dict()))) == found
