"""What a lab is to be: nodes, rates, sites."""

from collections.abc import Mapping
from dataclasses import dataclass

from co2sim.common.errors import UnitError
from co2sim.common.units import BytesPerSecond, Seconds, parse
from co2sim.common.validation import whole
from realrun.errors import LabError
from realrun.lab.network_namespaces import SendRates, payload_share, site_burst
from realrun.lab.time_dilation import MOST
from realrun.launch.launcher import MAX_RANKS

_TWO = 2


_SOURCES = {
    "wan.bandwidth": "rate of tc tbf at each site's uplink",
    "wan.efficiency": "TCP payload of an Ethernet frame, as between nodes",
    "host.wan.size": "burst of tc tbf at each site's uplink; it holds whole packets of nodes",
}


def wan_facts(rates: SendRates, sites: int, text: str | None) -> dict[str, str]:
    """What `text`, the rate of a site, gives, by dotted key, with units; empty for one site."""
    if text is None or rates.site is None:
        return {}
    return {
        "wan.bandwidth": " ".join(text.split()),
        "wan.efficiency": f"{payload_share(rates.node, two=sites == _TWO):.4f}",
        "host.wan.size": f"{site_burst(rates.site, rates.node)} B",
    }


def overrides(uplink: Mapping[str, str], sites: int, latency: Seconds) -> dict[str, str]:
    """Those that give a cluster of as many nodes at one site its sites; empty for one site."""
    if not uplink:
        return {}
    return {"sites": str(sites), "wan.latency": f"{latency:.4g} s"} | dict(uplink)


def stated_wan(facts: Mapping[str, str], latency: str) -> str:
    """The parts [wan] and [host.wan] of a cluster file; nothing for one site.

    The latency is one to assume.
    """
    if not facts:
        return ""
    late = f'latency = {{ value = "{latency}", assumed = true, source = "as between nodes" }}'
    lines = {
        key: f'{{ value = "{text}", source = "{_SOURCES[key]}" }}' for key, text in facts.items()
    }
    link = [f"{key.removeprefix('wan.')} = {lines[key]}" for key in facts if key.startswith("wan.")]
    burst = f"size = {lines['host.wan.size']}"
    return "\n".join(["\n[wan]", *link, late, "", "[host.wan]", burst, ""])


INTRA_RATE = "3 Gbit/s"
"""A rate that loopback reaches for every rank, even if two ranks share a core and both send."""


@dataclass(frozen=True, slots=True)
class Lab:
    """What to build: `rate` is what each node sends at most, such as "1 Gbit/s".

    `intra_rate` is what each rank sends at most inside its node; the ranks of a node share the sum.
    `sites` divide the nodes, in order; `wan` is what each sends to others at most. The lab has all
    rates divided by `dilation`, and its clock is as much slower (`time_dilation`). Raises
    LabError when it cannot be built anywhere.
    """

    nodes: int
    gpus_per_node: int
    rate: str
    intra_rate: str = INTRA_RATE
    sites: int = 1
    wan: str | None = None
    dilation: int = 1

    def __post_init__(self) -> None:
        for name, count in (("nodes", self.nodes), ("gpus per node", self.gpus_per_node)):
            whole(name, count, 1, error=LabError)
        if self.world_size > MAX_RANKS:
            raise LabError(
                f"{self.nodes} nodes of {self.gpus_per_node} are {self.world_size} ranks;"
                f" a lab has at most {MAX_RANKS}"
            )
        _bandwidth("rate", self.rate)
        _bandwidth("rate inside a node", self.intra_rate)
        whole("sites", self.sites, 1, error=LabError)
        whole("dilation", self.dilation, 1, MOST, error=LabError)
        if self.nodes % self.sites:
            raise LabError(f"{self.nodes} nodes do not divide into {self.sites} equal sites")
        if (self.sites > 1) != (self.wan is not None):
            raise LabError(
                f"sites is {self.sites} and the rate between sites is {self.wan}: several sites"
                " need one, and one has none"
            )
        if self.wan is not None:
            _bandwidth("rate between sites", self.wan)

    @property
    def rates(self) -> SendRates:
        """What is sent at most, by the clock of the machine."""
        far = None
        if self.wan is not None:
            far = _bandwidth("rate between sites", self.wan) / self.dilation
        return SendRates(self.bandwidth, self.loopback, far)

    @property
    def uplink(self) -> dict[str, str]:
        """The link of a site to others as a cluster states it, by key; empty for one site."""
        return wan_facts(self.rates, self.sites, self.wan)

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.nodes * self.gpus_per_node

    @property
    def bandwidth(self) -> BytesPerSecond:
        """What each node sends to others at most, with all headers, by the clock of the machine."""
        return _bandwidth("rate", self.rate) / self.dilation

    @property
    def loopback(self) -> BytesPerSecond:
        """What the ranks of a node send each other at most, all together, as `bandwidth`."""
        rate = _bandwidth("rate inside a node", self.intra_rate)
        return self.gpus_per_node * rate / self.dilation


def _bandwidth(what: str, text: str) -> BytesPerSecond:
    try:
        value = parse(text, "B/s")
    except UnitError as error:
        raise LabError(f"the {what} of a lab: {error}") from error
    slowest, fastest = 1e6 / 8, 1e11 / 8
    if not slowest <= value <= fastest:
        raise LabError(f"the {what} is {text!r}; it must be 1 Mbit/s to 100 Gbit/s")
    return value
