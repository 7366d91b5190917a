"""What is paid for a training: hours of the GPUs that train, or what a contract asks for besides.

    cost = GPUs billed x time billed x price + storage x time + egress

`bill` is the only function that says what a time on some GPUs costs. It never falls with time or
GPUs, so that what a lower bound of the time costs is a lower bound of the cost.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from co2sim.common.errors import OptionError, UnitError
from co2sim.common.units import Seconds, UsdPerSecond, parse
from co2sim.common.validation import (
    Natural,
    Price,
    PricePerByte,
    PriceToStore,
    Quantity,
    Size,
    Time,
    check,
)

_HOUR: Seconds = 3600.0
_RESERVED = Quantity(unit="USD/s", least=0)


@dataclass(frozen=True, slots=True)
class Contract:
    """What an offer asks for beside its price of a GPU-hour.

    `term` is the least time that is billed. `whole`: all GPUs of the offer are billed, whatever
    part of them trains; at least `least_gpus` are. `reserved` has prices of a GPU by the term that
    is committed, such as "1 year": they hold for longer, too. `storage` is billed at
    `storage_price` for as long as the training takes, `egress` at `egress_price` once. All prices
    are in the currency of the cluster. Raises OptionError for what no contract can be.
    """

    term: Time = 0.0
    whole: bool = False
    least_gpus: Natural = 0
    reserved: Mapping[str, Price] = field(default_factory=dict)
    storage: Size | None = None
    storage_price: PriceToStore | None = None
    egress: Size | None = None
    egress_price: PricePerByte | None = None

    def __post_init__(self) -> None:
        """Refuse an amount without its price, and terms that are no times."""
        check(self, "contract")
        for name in ("storage", "egress"):
            if (getattr(self, name) is None) != (getattr(self, f"{name}_price") is None):
                raise OptionError(f"contract: {name} and {name}_price go together; give both")
        for term, price in self.reserved.items():
            _RESERVED.checked(f"contract: reserved {term}", price)
            _seconds(term)

    @property
    def storing(self) -> UsdPerSecond:
        """What the storage costs."""
        return (self.storage or 0.0) * (self.storage_price or 0.0)

    @property
    def leaving(self) -> float:
        """What the egress costs, once."""
        return (self.egress or 0.0) * (self.egress_price or 0.0)

    def offers(self, price: UsdPerSecond) -> Iterator[tuple[str, Seconds, UsdPerSecond]]:
        """All ways to buy: the term that is committed, as a text, what it lasts, and the price."""
        yield "", self.term, price
        for text, reserved in self.reserved.items():
            yield text, max(self.term, _seconds(text)), reserved


def _seconds(term: str) -> Seconds:
    try:
        return parse(term, "s")
    except UnitError as error:
        raise OptionError(f"contract: reserved {term!r}: {error}") from None


BY_THE_HOUR = Contract()
"""Nothing but the hours of the GPUs that train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What a training is billed, in the currency of its cluster.

    Each of `gpus` is billed for `hours` at `price_per_hour`: those that train for as long as they
    do, or more by a contract. `committed` is the term whose reserved price that is; empty: the
    plain price.
    """

    gpus: int
    hours: float
    price_per_hour: float
    committed: str
    compute: float
    storage: float
    egress: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.compute + self.storage + self.egress


def bill(price: UsdPerSecond, contract: Contract | None, gpus: int, seconds: Seconds) -> Bill:
    """What a time on some GPUs is billed by the cheapest way to buy.

    It falls neither with `gpus` nor with `seconds`: every way is the product of two numbers that
    do not, and the least of such is one, too.
    """
    asked = contract or BY_THE_HOUR
    billed = max(gpus, asked.least_gpus)
    ways = [
        (billed * max(seconds, least) * each, text, max(seconds, least), each)
        for text, least, each in asked.offers(price)
    ]
    compute, text, lasting, each = min(ways)
    return Bill(
        gpus=billed,
        hours=lasting / _HOUR,
        price_per_hour=each * _HOUR,
        committed=text,
        compute=compute,
        storage=asked.storing * seconds,
        egress=asked.leaving,
    )
