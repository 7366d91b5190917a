"""The links between the sites of a lab, as a cluster file of co2sim states them."""

from collections.abc import Mapping

from co2sim.units import Seconds
from realrun.launch.namespaces import SendRates, payload_share, site_burst

_TWO = 2


_SOURCES = {
    "bandwidth": "rate of tc tbf at each site's uplink",
    "efficiency": "TCP payload of an Ethernet frame, as between nodes",
    "burst": "burst of tc tbf there; it holds whole packets of nodes",
}


def wan_facts(rates: SendRates, sites: int, text: str | None) -> dict[str, str]:
    """What `text`, the rate of a site, gives, by key, with units; empty for one site."""
    if text is None or rates.site is None:
        return {}
    return {
        "bandwidth": " ".join(text.split()),
        "efficiency": f"{payload_share(rates.node, two=sites == _TWO):.4f}",
        "burst": f"{site_burst(rates.site, rates.node)} B",
    }


def overrides(uplink: Mapping[str, str], sites: int, latency: Seconds) -> dict[str, str]:
    """Those that give a cluster of as many nodes at one site its sites; empty for one site."""
    if not uplink:
        return {}
    link = {f"wan.{key}": text for key, text in uplink.items()}
    return {"sites": str(sites), "wan.latency": f"{latency:.4g} s"} | link


def stated_wan(facts: Mapping[str, str], latency: str) -> str:
    """The part [wan] of a cluster file, with a latency to assume; nothing for one site."""
    if not facts:
        return ""
    lines = [
        f'{key} = {{ value = "{text}", source = "{_SOURCES[key]}" }}' for key, text in facts.items()
    ]
    late = f'latency = {{ value = "{latency}", assumed = true, source = "as between nodes" }}'
    return "\n".join(["\n[wan]", *lines, late, ""])
