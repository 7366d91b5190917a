"""What is billed for a training, in one line: hours of a part, the whole offer, or a contract."""

from co2sim.catalog import Entry
from co2sim.common.units import counted, number
from co2sim.hardware.cluster import Cluster
from co2sim.hardware.contract import Bill
from co2sim.prediction.totals import DAY, Totals

_HOURS = 24
"""Of a day."""


def billed(totals: Totals, offer: Entry[Cluster], deadline: float | None = None) -> str:
    """What is billed for the totals of an `offer`, or of a part of it; nothing without a price.

    By the hour it also says what all GPUs of the offer would be, for `deadline` days or, without
    one, as long. Of the catalog's clusters any number can be rented: they are no offers.
    """
    bill, currency = totals.bill, totals.currency
    if bill is None:
        return ""
    gpus = round(totals.gpu_hours / totals.days / _HOURS)
    price = f"{bill.price_per_hour:,.2f} {currency}/h"
    if offer.value.contract is not None:
        return f"{_hours(bill)}, a contract at {price}{_parts(bill, str(currency))}"
    text = f"{_hours(bill)} by the hour, at {price}"
    whole = offer.value.layout.world_size
    if gpus >= whole or any(fact.path == "nodes" for fact in offer.assumed):
        return text
    days = totals.days if deadline is None else deadline
    everything = offer.value.bill(days * DAY)
    assert everything is not None
    lasting = "for as long" if deadline is None else "for the deadline"
    return f"{text}; all {whole:,} of the offer {lasting}: {everything.total:,.0f} {currency}"


def _hours(bill: Bill) -> str:
    return f"{counted(bill.gpus, 'GPU')} for {number(bill.hours / _HOURS)} days"


def _parts(bill: Bill, currency: str) -> str:
    """What a contract is made of, where that is more than its plain price."""
    parts = []
    if bill.committed:
        parts.append(f"as {bill.committed} are committed")
    parts += [
        f"{name} {amount:,.0f} {currency}"
        for name, amount in (("storage", bill.storage), ("egress", bill.egress))
        if amount
    ]
    return f" ({', '.join(parts)})" if parts else ""
