"""Nodes as network namespaces, plugged into bridges, with limited rates. Needs root."""

import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from co2sim.common.units import BytesPerSecond, Seconds
from realrun.errors import LabError
from realrun.launch.processes import entering

SWITCH = "10.77.255.254"
"""The address of the bridge, where the launcher serves its store."""

PAYLOAD = 1448
"""Bytes of payload in an Ethernet frame: 1500 - 20 (IPv4) - 20 (TCP) - 12 (TCP timestamps)."""

FRAME = 1514
"""Bytes of that frame as tbf counts them: with the 14 of its Ethernet header."""

ACK = 66
"""Bytes of the frame that acknowledges a packet: 14 (Ethernet) + 20 (IPv4) + 32 (TCP)."""

LOOPBACK_PAYLOAD, LOOPBACK_FRAME = 65536 - 52, 65536 + 14
"""The same on the loopback device."""

_TIMER: Seconds = 2e-3
_LOOPBACK_TIMER: Seconds = 1e-3
_WAIT: Seconds = 0.7e-3
_MAX_WAITING, _MAX_AT_ONCE = 256 * 1024, 512 * 1024

_LONGEST_PACKET = 65536
"""What TCP hands over at most, whatever is allowed: GSO_LEGACY_MAX_SIZE of Linux."""

_SYSCTLS = {
    # Nothing is ever lost, so the window just grows until the pipe is full, and stays so.
    "ipv4/tcp_congestion_control": "reno",
    "ipv4/tcp_slow_start_after_idle": "0",
    # Packets overtake each other where several cores serve one link. TCP would take those that come
    # late for lost ones, send them again, and halve the window: 670 packets in 30 rounds of 70 MB.
    "ipv4/tcp_sack": "0",
    "ipv4/tcp_max_reordering": "1000",
    "ipv4/tcp_reordering": "1000",
    "ipv6/conf/all/disable_ipv6": "1",
}


_WINDOW = 256 * 1024
"""Bytes that a connection may have under way between sites: what waits there delays all others."""


@dataclass(frozen=True, slots=True)
class SendRates:
    """What is sent at most, with all headers, in bytes a second.

    `node`: by a node to others, `loopback`: by the ranks of a node to each other, all together,
    `site`: by a site to others; None where all nodes are at one.
    """

    node: BytesPerSecond
    loopback: BytesPerSecond
    site: BytesPerSecond | None = None


def make_nodes(count: int, rates: SendRates, sites: int = 1) -> list[int]:
    """Make the bridge, and nodes on it; the processes that hold the nodes.

    Several sites have a bridge each, which a limited link joins to the first one. Raises LabError
    when a tool fails.
    """
    _ip(
        "link set lo up",
        "link add br0 type bridge stp_state 0 forward_delay 0",
        f"addr add {SWITCH}/16 dev br0",
        "link set br0 up",
    )
    bridges = ["br0"]
    if rates.site is not None:
        bridges = [_site(number, rates.node, rates.site) for number in range(sites)]
    return [_node(index, rates, bridges[index * sites // count]) for index in range(count)]


def _site(number: int, node: BytesPerSecond, bandwidth: BytesPerSecond) -> str:
    """Make the bridge of a site, and its limited link to the others; its name."""
    bridge, uplink, other = f"site{number}", f"wan{number}", f"from{number}"
    _ip(
        f"link add {bridge} type bridge stp_state 0 forward_delay 0",
        f"link add {uplink} type veth peer name {other}",
        f"link set {other} master br0 up",
        f"link set {uplink} master {bridge} up",
        f"link set {bridge} up",
    )
    _limit((), uplink, bandwidth, site_burst(bandwidth, node))
    return bridge


def site_burst(bandwidth: BytesPerSecond, node: BytesPerSecond) -> int:
    """Bytes that may leave a site at once after a pause: whole packets of its nodes, too."""
    return max(burst(bandwidth), 2 * queue(node)[1])


def burst(bandwidth: BytesPerSecond) -> int:
    """Bytes that may pass at once after a pause: predictions know them, so they may be many.

    They make up for timers of tbf that are served late, 3 ms and more on a busy virtual machine:
    what a bucket of 0.7 ms cannot hold is lost, 5 to 12 % of the rate in one lab of 4 nodes.
    """
    return max(queue(bandwidth)[0], min(int(bandwidth * _TIMER), _MAX_AT_ONCE))


def queue(bandwidth: BytesPerSecond) -> tuple[int, int]:
    """Bytes that may wait for the limit, and bytes of the longest packet that TCP may hand over.

    Answers wait behind them, so they are few; but a burst has to hold whole packets, else tbf
    splits them and drops some.
    """
    frames = 2  # that TCP sends at once whatever is asked
    size = min(max(int(bandwidth * _WAIT), 2 * frames * FRAME), _MAX_WAITING)
    return size, max(size // 3, frames * FRAME)


def payload_share(bandwidth: BytesPerSecond, *, two: bool) -> float:
    """What payload gets of the bytes that a node sends, if as much comes to it.

    The rest is headers of frames, and an acknowledgement for every packet that comes: one of as
    many whole frames as the longest holds. Between `two` nodes most of them travel with data.
    """
    if two:
        return PAYLOAD / FRAME
    packet = min(queue(bandwidth)[1], _LONGEST_PACKET)
    frames = max(1, packet // FRAME)
    return frames * PAYLOAD / (frames * FRAME + ACK)


def loopback_burst(bandwidth: BytesPerSecond) -> int:
    """The same on loopback, which works on the cores of the ranks."""
    return max(int(bandwidth * _LOOPBACK_TIMER), 2 * LOOPBACK_FRAME)


def _node(index: int, rates: SendRates, bridge: str) -> int:
    """Make one node on a bridge; the process that holds it."""
    holder = subprocess.Popen(
        ["unshare", "--net", "cat"],  # noqa: S607 - found on PATH before
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    holder.stdin.write(b"\n")
    holder.stdin.flush()
    if not holder.stdout.read(1):  # what cat gives back, once it is in its namespace
        raise LabError(f"cannot make node {index}")
    waiting, longest = queue(rates.node)
    port, enter = f"node{index}", entering(holder.pid)
    _ip(f"link add {port} type veth peer name eth0 netns {holder.pid}")
    _ip(f"link set {port} gso_max_size {longest} master {bridge} up")
    # A short queue in front of the rate limit: answers to what comes in wait behind it.
    values = _SYSCTLS | {"ipv4/tcp_limit_output_bytes": str(waiting)}
    if rates.site is not None:
        values |= {"ipv4/tcp_wmem": f"4096 65536 {_WINDOW}"}
    _sysctl(enter, values)
    _ip(
        "link set lo up",
        f"addr add 10.77.{index // 250}.{index % 250 + 1}/16 dev eth0",
        f"link set eth0 gso_max_size {longest} up",
        enter=enter,
    )
    _limit(enter, "eth0", rates.node, burst(rates.node))
    _limit(enter, "lo", rates.loopback, loopback_burst(rates.loopback))
    return holder.pid


def _limit(enter: Sequence[str], device: str, bandwidth: BytesPerSecond, size: int) -> None:
    """Let a device send at most `bandwidth`, after bursts of `size` bytes."""
    tbf = f"rate {bandwidth * 8:.0f}bit burst {size} limit 64mb"
    run_tool([*enter, *f"tc qdisc replace dev {device} root tbf {tbf}".split()])


def on_cores(rank: int, ranks: int, cores: Sequence[int]) -> tuple[int, ...]:
    """The cores that a rank keeps to; none where there are fewer cores than ranks.

    Else Linux moves what a rank computes to a core of another one while its threads communicate,
    and both are slower.
    """
    each = len(cores) // ranks
    return tuple(cores[rank * each : (rank + 1) * each])


def _ip(*commands: str, enter: Iterable[str] = ()) -> None:
    run_tool([*enter, "ip", "-batch", "-"], "\n".join(commands))


def _sysctl(enter: Iterable[str], values: Mapping[str, str]) -> None:
    """Set what the kernel has; a key that it lacks changes little."""
    lines = [f"echo {value} > /proc/sys/net/{key}" for key, value in values.items()]
    script = "\n".join(f"({line}) 2>/dev/null" for line in lines)
    run_tool([*enter, "sh", "-c", f"{script}\ntrue"])


def run_tool(command: Sequence[str], text: str = "") -> None:
    """Run one of the tools. Raises LabError with what it says when it fails."""
    done = subprocess.run(  # noqa: S603 - one of TOOLS
        command, input=text, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise LabError(f"`{' '.join(command)}` failed: {said}")
