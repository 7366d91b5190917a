"""What a training is billed: sums by hand, and what holds of any contract."""

import json
import tomllib
from pathlib import Path

import pytest
from commands import OFFER, Command
from hypothesis import given
from hypothesis import strategies as st

from co2sim.catalog import load_cluster
from co2sim.common.units import parse
from co2sim.hardware.contract import Bill, Contract, bill
from co2sim.prediction.driver import run
from co2sim.prediction.question import Question
from co2sim.prediction.totals import totals_of
from co2sim.report.text.bill import billed as billed_line

DAY, HOUR = 86400.0, 3600.0
MONTH = 31_557_600.0 / 12
TWO = 2.12 / HOUR


def billed(contract: Contract | None, gpus: int, days: float, price: float = TWO) -> Bill:
    """The bill of some days."""
    return bill(price, contract, gpus, days * DAY)


def test_hours_of_a_part_are_gpus_times_hours_times_price() -> None:
    """64 GPUs for 44.3 days at 2.12 USD an hour."""
    found = billed(None, 64, 44.3)
    assert found.total == pytest.approx(64 * 44.3 * 24 * 2.12)
    assert (found.gpus, found.hours) == (64, pytest.approx(44.3 * 24))


def test_a_whole_offer_for_its_term_is_billed_whatever_part_trains() -> None:
    """128 GPUs for 92 days at 2.12 USD are 599,163 USD, though 64 need 44 days."""
    contract = Contract(term=92 * DAY, whole=True, least_gpus=128)
    assert billed(contract, 64, 44).total == pytest.approx(599_162.88)
    assert billed(contract, 64, 100).total == pytest.approx(128 * 100 * 24 * 2.12)


@pytest.mark.parametrize(
    ("days", "total", "committed"),
    [
        (10, 10 * 24 * 3.0, ""),  # by the hour: 90 days at 2 USD are dearer
        (61, 90 * 24 * 2.0, "90 days"),  # 61 days at 3 USD are dearer than 90 at 2
        (100, 100 * 24 * 2.0, "90 days"),
        (300, 365.25 * 24 * 1.5, "1 year"),  # 300 days at 2 USD are dearer than a year at 1.50
    ],
)
def test_the_cheapest_reserved_price_counts(days: float, total: float, committed: str) -> None:
    """A term is committed where all of it costs less than the days that are needed."""
    contract = Contract(reserved={"90 days": 2.0 / HOUR, "1 year": 1.5 / HOUR})
    found = billed(contract, 1, days, 3.0 / HOUR)
    assert found.total == pytest.approx(total)
    assert found.committed == committed


def test_storage_lasts_as_long_as_the_training_and_egress_is_paid_once() -> None:
    """50 TB for three months at 20 USD a TB and month, and 10 TB at 0.05 USD a GB."""
    contract = Contract(
        storage=50e12, storage_price=20 / 1e12 / MONTH, egress=10e12, egress_price=0.05 / 1e9
    )
    found = billed(contract, 8, 3 * MONTH / DAY)
    assert (found.storage, found.egress) == (pytest.approx(3000.0), pytest.approx(500.0))
    assert found.total == pytest.approx(found.compute + 3500.0)


prices = st.floats(0.01, 20).map(lambda usd: usd / HOUR)
contracts = st.builds(
    Contract,
    term=st.floats(0, 400 * DAY),
    whole=st.booleans(),
    least_gpus=st.integers(0, 1000),
    reserved=st.dictionaries(st.sampled_from(("30 days", "1 year", "3 years")), prices),
    storage=st.just(1e12),
    storage_price=st.floats(0, 1e-15),
    egress=st.just(1e12),
    egress_price=st.floats(0, 1e-9),
)
times, counts = st.floats(1, 2000 * DAY), st.integers(1, 10_000)


@given(contracts, prices, st.tuples(times, times), st.tuples(counts, counts))
def test_more_time_or_more_gpus_never_cost_less(
    contract: Contract, price: float, times: tuple[float, float], counts: tuple[int, int]
) -> None:
    """So what the least time costs is the least that a training costs."""
    (short, long), (few, many) = sorted(times), sorted(counts)
    least = bill(price, contract, few, short).total
    assert least <= bill(price, contract, few, long).total
    assert least <= bill(price, contract, many, short).total


@given(contracts, prices, times, counts)
def test_no_contract_is_below_the_hours_that_train_at_its_lowest_price(
    contract: Contract, price: float, seconds: float, gpus: int
) -> None:
    """Nor above the plain price of what it bills."""
    found = bill(price, contract, gpus, seconds)
    lowest = min((price, *contract.reserved.values()))
    assert found.compute >= gpus * seconds * lowest * (1 - 1e-12)
    whole = max(gpus, contract.least_gpus) * max(seconds, contract.term) * price
    assert found.compute <= whole * (1 + 1e-12)


CONTRACT = """
[contract]
term = "92 days"
whole = true
storage = "50 TB"
storage_price = "20 EUR/TB/month"
egress = "10 TB"
egress_price = "0.05 EUR/GB"
reserved = { "1 year" = "1.80 EUR/h" }
"""


@pytest.fixture
def offer(tmp_path: Path) -> str:
    """Four nodes of eight GPUs at 2 EUR an hour, as a whole."""
    text = OFFER.format(name="an offer", price=2, rate=400, nodes=4).replace("USD", "EUR")
    path = tmp_path / "offer.toml"
    path.write_text(text + CONTRACT, "utf-8")
    return str(path)


def test_a_file_may_have_a_contract_and_a_part_of_a_whole_pays_all(offer: str) -> None:
    """Also a part of a part; with `whole` off only its GPUs are billed."""
    whole = load_cluster(offer).value
    half = whole.resized(16)
    for part in (whole, half, half.resized(8)):
        found = part.bill(40 * DAY)
        assert found is not None
        assert (found.gpus, found.hours) == (32, pytest.approx(92 * 24))
        assert found.compute == pytest.approx(32 * 92 * 24 * 2)
        assert found.storage == pytest.approx(50 * 20 * 40 * DAY / MONTH)
        assert found.egress == pytest.approx(500)
    by_part = load_cluster(offer, {"contract.whole": "false"}).value.resized(16).bill(40 * DAY)
    assert by_part is not None
    assert by_part.gpus == 16


@pytest.mark.parametrize("whole", [True, False])
def test_a_training_on_a_part_of_an_offer_has_its_bill(
    cli: Command, offer: str, *, whole: bool
) -> None:
    """As JSON its cost is the bill's; both ends are the same where the term is longer."""
    on = ("-c", offer, "-m", "gpt2-small", "-s", "ddp", "-g", "8", "--tokens", "1e9")
    ended = cli("run", *on, "--set", f"contract.whole={whole}", "--json")
    totals = json.loads(ended.out)["totals"]
    gpus = 32 if whole else 8
    assert totals["bill"]["gpus"] == gpus
    days = totals["days"]
    by_hand = gpus * 92 * 24 * 2 + 50 * 20 * days * DAY / MONTH + 500
    assert totals["cost"] == pytest.approx(by_hand)
    assert totals["cost_high"] == pytest.approx(
        by_hand + 50 * 20 * (totals["days_high"] - days) * DAY / MONTH
    )


def test_a_part_by_the_hour_says_what_all_would_cost(offer: str) -> None:
    """Its own GPUs and days, and all 32 for the deadline, without the contract: 141,312 EUR."""
    text = Path(offer).read_text("utf-8").partition("[contract]")[0]
    Path(offer).write_text(text, "utf-8")
    case = Question(cluster=offer, model="gpt2-small", strategy="ddp", gpus=8)
    totals = totals_of(case, run(case), 1e9)
    assert totals is not None
    said = billed_line(totals, case.load()[0], deadline=92)
    assert f"{32 * 92 * 24 * 2:,} EUR" in said
    assert "8 GPUs" in said


def test_prices_of_the_catalog_are_defaults_of_what_there_is() -> None:
    """Each GPU or cluster has at most one, of the catalog, and its title names it."""
    root = Path(load_cluster.__code__.co_filename).parent
    table = tomllib.loads((root / "prices.toml").read_text("utf-8"))
    named = [of for entry in table.values() for of in entry.get("default_of", ())]
    assert len(named) == len(set(named))
    for of in named:
        assert (root / "gpus" / f"{of}.toml").exists() or (
            root / "clusters" / f"{of}.toml"
        ).exists()
    assert all(entry.get("title") for entry in table.values() if "default_of" in entry)


def price(cluster: str, **changes: str) -> tuple[float, bool] | None:
    """USD per hour of a cluster, and whether it is assumed."""
    found = load_cluster(cluster, changes)
    fact = next((one for one in found.facts if one.path == "price_per_gpu"), None)
    return fact and (parse(fact.value, "USD/s") * HOUR, fact.assumed)


def test_a_cluster_has_its_own_price_else_that_of_its_gpu_else_none(tmp_path: Path) -> None:
    """A published one is assumed; what a user gives is not. Another GPU has another price."""
    assert price("dgx-h100") == (pytest.approx(2.95), True)
    assert price("p5.48xlarge") == (pytest.approx(6.88), True)
    assert price("p5.48xlarge", gpu="h200") == price("dgx-h200")
    assert price("a800-1600g") is None
    assert price("dgx-h100", price_per_gpu="2 USD/h") == (pytest.approx(2), False)
    assert price("a800-1600g", price_per_gpu="h100-median-2026-05") == (pytest.approx(2.95), False)
    text = OFFER.format(name="mine", price=2, rate=400, nodes=4)
    path = tmp_path / "mine.toml"
    path.write_text(text, "utf-8")
    assert price(str(path)) == (pytest.approx(2), False)
    path.write_text("\n".join(one for one in text.splitlines() if "price" not in one), "utf-8")
    gpu = tomllib.loads(text)["gpu"]
    assert price(str(path)) == price("dgx-h100", gpu=gpu)
