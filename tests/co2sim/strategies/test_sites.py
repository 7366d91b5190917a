"""Sites as workers: who meets, what crosses the links between sites, memory, and simulation."""

from collections.abc import Callable
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from one_sample import simulate

from co2sim import strategies
from co2sim.hardware.cluster import Cluster, Link
from co2sim.schedule.schedule import SITE, SITE_PEERS, Layout, Schedule
from co2sim.simulation.costs import traffic
from co2sim.simulation.run import execute
from co2sim.simulation.trace import Trace

LATENT = {"intra": Link(10e9, 1e-7), "inter": Link(1e9, 1e-6)}

SHAPES = [(2, 2, 2), (4, 1, 2), (4, 2, 2), (6, 1, 3), (4, 2, 4)]
"""Nodes, GPUs per node, sites: sites of one node and of several, two sites and more."""

shapes, variants = st.sampled_from(SHAPES), st.sampled_from(tiny.BY_SITE)


def cluster(shape: tuple[int, int, int], **changes: Any) -> Cluster:
    """Links between sites ten times as slow as those between nodes."""
    nodes, gpus, sites = shape
    fields: dict[str, Any] = {**LATENT, "sites": sites, "wan": Link(1e8, 1e-5)}
    return tiny.cluster(nodes, gpus, **fields | changes)


def schedule(strategy: str, shape: tuple[int, int, int], **changes: Any) -> Schedule:
    """The schedule of a strategy for the tiny job."""
    return strategies.parse(strategy).schedule(tiny.job(**changes), Layout(*shape))


def run(text: str, on: Cluster, rounds: int = 3, **options: Any) -> Trace:
    """Simulate rounds of the tiny job."""
    made = strategies.parse(text).schedule(tiny.job(), on.layout)
    return execute(made, on, precision="bf16", rounds=rounds, **options)


# --- who meets ---------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_a_site_is_its_ranks_and_its_peers_are_one_rank_of_each_site(
    sites: int, per_site: int, gpus: int
) -> None:
    """Of (site, place) the ranks of a site share the first, and peers the second."""
    layout = Layout(sites * per_site, gpus, sites)
    places = {rank: divmod(rank, per_site * gpus) for rank in range(layout.world_size)}
    for rank, (site, place) in places.items():
        inside = [one for one, (where, _) in places.items() if where == site]
        across = [one for one, (_, where) in places.items() if where == place]
        assert list(SITE.members(rank, layout)) == inside
        assert list(SITE_PEERS.members(rank, layout)) == across


def test_the_schedule_is_the_golden_one(golden: Callable[[str, str], None]) -> None:
    """On two sites of two nodes of 2 GPUs a rank averages a fourth of every fragment."""
    for text in ("co2(tau=2,delay=1,worker=site)", "diloco(tau=2,worker=site,inner=fsdp)"):
        name = text.replace("(", "-").replace("=", "-").replace(",", "-").removesuffix(")")
        golden(name, f"{schedule(text, (4, 2, 2))}\n")


@given(variants)
def test_where_a_site_is_a_node_it_does_not_matter_which_of_them_is_the_worker(
    strategy: str,
) -> None:
    """Every op starts and ends when it does with worker=node, and memory is the same."""
    on = cluster((4, 2, 4))
    by_node = strategy.replace("worker=site", "worker=node")
    spans = [[span[:5] for span in run(text, on).spans] for text in (strategy, by_node)]
    assert spans[0] == spans[1]
    one, other = (
        strategies.parse(text).memory(tiny.job(), on.layout) for text in (strategy, by_node)
    )
    assert one == other


# --- what crosses the links between sites ------------------------------------------------------


@given(
    shapes, st.sampled_from(["local_sgd(tau=3,worker=site)", "co2.published(tau=3,worker=site)"])
)
def test_a_site_sends_the_model_once_around_its_peers(
    shape: tuple[int, int, int], strategy: str
) -> None:
    """2 (S-1)/S x 4 bytes x parameters a round and site, however many GPUs share them.

    Each of the m GPUs of a site averages a share of P / m parameters, rounded up, in a ring of S;
    nothing that a local step does leaves the site.
    """
    nodes, gpus, sites = shape
    m = nodes * gpus // sites
    sent = traffic(schedule(strategy, shape), cluster(shape))
    assert sent.wan == pytest.approx(2 * (sites - 1) / sites * 4 * m * -(-2000 // m))


# --- as a user asks ----------------------------------------------------------------------------


def test_what_a_site_can_hold_is_at_one_site() -> None:
    """It crosses no WAN, and says so; equal parts of all sites are asked for by fewer nodes."""
    one = simulate("two-sites-wan", "gpt2-small", "zero2", gpus=32)
    two = simulate("two-sites-wan", "gpt2-small", "zero2", gpus=32, overrides={"nodes": "4"})
    assert one.wan_bytes_per_site_per_step == 0
    assert any("at one site" in note for note in one.notes)
    assert two.wan_bytes_per_site_per_step > 0
    assert two.tokens_per_s < one.tokens_per_s
