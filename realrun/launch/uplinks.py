"""The links between the sites of a lab, as a cluster file of co2sim states them."""

from collections.abc import Mapping

from realrun.launch.namespaces import Rates, payload_share, site_burst

_TWO = 2


def wan_facts(rates: Rates, sites: int, text: str | None) -> dict[str, tuple[str, str]]:
    """What `text`, the rate of a site, gives: values of TOML and sources; empty for one site."""
    if text is None or rates.site is None:
        return {}
    share = payload_share(rates.node, two=sites == _TWO)
    size = site_burst(rates.site, rates.node)
    return {
        "bandwidth": (f'"{" ".join(text.split())}"', "rate of tc tbf at each site's uplink"),
        "efficiency": (f"{share:.4f}", "TCP payload of an Ethernet frame, as between nodes"),
        "burst": (f'"{size} B"', "burst of tc tbf there; it holds whole packets of nodes"),
    }


def stated_wan(facts: Mapping[str, tuple[str, str]]) -> str:
    """The part [wan] of a cluster file; nothing for one site."""
    if not facts:
        return ""
    lines = [
        f'{key} = {{ value = {text}, source = "{source}" }}'
        for key, (text, source) in facts.items()
    ]
    late = 'latency = { value = "250 us", assumed = true, source = "as between nodes" }'
    return "\n".join(["\n[wan]", *lines, late, ""])
