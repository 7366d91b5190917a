"""A cluster of network namespaces on one machine, with known bandwidths.

Each node is a network namespace whose `eth0` is plugged into the bridge of its site or leaf. `tc
tbf` limits what it sends there, what its ranks send each other over loopback, and what sites or
leaves send to others, and get. All of it is in its own network, process and mount namespaces: the
network of the machine does not change, and everything is gone when the first process of the
namespace ends.

    launcher - unshare - first process (reaps) - lab process - one holder a node, and the ranks
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from co2sim.common.convert import Reader, option
from co2sim.common.errors import Co2simError, UnitError, error_line
from co2sim.common.units import BytesPerSecond, Seconds, counted, duration, parse
from co2sim.common.validation import whole
from co2sim.hardware.cluster import FULLY_IDLE
from co2sim.hardware.fabric import Fabric, Tier
from realrun.errors import REALTIME, SITES, LabError, one_of
from realrun.lab.time_dilation import DILATION, MOST, chosen
from realrun.launch import launcher, processes
from realrun.launch.monitor import supervise

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
"""Bytes that a connection may have under way where switches are joined by limited links: what waits
there delays all others."""


def make_nodes(lab: "Lab") -> list[int]:
    """Make the bridge, and nodes on it; the processes that hold the nodes.

    Sites, and leaves, have a bridge each, which a limited link joins to the first one. Raises
    LabError when a tool fails.
    """
    _ip(
        "link set lo up",
        "link add br0 type bridge stp_state 0 forward_delay 0",
        f"addr add {SWITCH}/16 dev br0",
        "link set br0 up",
    )
    return [_node(index, lab, bridge) for index, bridge in enumerate(_bridges(lab, lab.uplink))]


def _bridges(lab: "Lab", uplink: "Uplink | None") -> list[str]:
    """Make those of sites or leaves; the one of each node."""
    if uplink is None:
        return ["br0"] * lab.nodes
    bridges = [_joined(uplink, index) for index in range(lab.nodes // uplink.nodes)]
    if lab.placement == "cyclic":
        return [bridges[node % len(bridges)] for node in range(lab.nodes)]
    return [bridges[node // uplink.nodes] for node in range(lab.nodes)]


def _joined(uplink: "Uplink", index: int) -> str:
    """Make a bridge, and its link to the first one, limited in both directions; its name."""
    bridge, up, down = f"{uplink.name}{index}", f"up{index}", f"down{index}"
    _ip(
        f"link add {bridge} type bridge stp_state 0 forward_delay 0",
        f"link add {up} type veth peer name {down}",
        f"link set {down} master br0 up",
        f"link set {up} master {bridge} up",
        f"link set {bridge} up",
    )
    for end in (up, down):
        _limit((), end, uplink.bandwidth, uplink.burst)
    return bridge


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


def _node(index: int, lab: "Lab", bridge: str) -> int:
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
    waiting, longest = queue(lab.bandwidth)
    port, enter = f"node{index}", processes.entering(holder.pid)
    _ip(f"link add {port} type veth peer name eth0 netns {holder.pid}")
    _ip(f"link set {port} gso_max_size {longest} master {bridge} up")
    # A short queue in front of the rate limit: answers to what comes in wait behind it.
    values = _SYSCTLS | {"ipv4/tcp_limit_output_bytes": str(waiting)}
    if lab.uplink:
        values |= {"ipv4/tcp_wmem": f"4096 65536 {_WINDOW}"}
    _sysctl(enter, values)
    _ip(
        "link set lo up",
        f"addr add 10.77.{index // 250}.{index % 250 + 1}/16 dev eth0",
        f"link set eth0 gso_max_size {longest} up",
        enter=enter,
    )
    _limit(enter, "eth0", lab.bandwidth, burst(lab.bandwidth))
    _limit(enter, "lo", lab.loopback, loopback_burst(lab.loopback))
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
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)  # noqa: S603 - one of TOOLS
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise LabError(f"`{' '.join(command)}` failed: {said}")


_RATE = Reader(lambda _, text: text, "RATE")
"""Read as a text; the lab checks it."""

INTRA_RATE = "3 Gbit/s"
"""A rate that loopback reaches for every rank, even if two ranks share a core and both send."""


Dilation = Annotated[
    str,
    typer.Option(
        metavar="auto|N",
        help="Run everything N times slower than stated, and clocks, too: times are those of the"
        " cluster that the lab stands for. auto: as cores need it where kernels sleep, else 1.",
    ),
]


@dataclass(frozen=True, slots=True)
class Uplink:
    """What joins the switch of `nodes` nodes, a site or a leaf, to others; in each direction.

    `bandwidth` is by the clock of the machine, `burst` are bytes that may pass after a pause.
    """

    name: Literal["site", "leaf"]
    nodes: int
    bandwidth: BytesPerSecond
    burst: int


@dataclass(frozen=True, slots=True)
class Lab:
    """What to build: `rate` is what each node sends at most, such as "1 Gbit/s".

    `intra_rate` is what each rank sends at most inside its node; the ranks of a node share the sum.
    `sites` divide the nodes, in order; `wan` is what each sends to others at most. Else `leaf`
    nodes share a switch, whose link to others has their rate divided by `oversubscription`. The lab
    has all rates divided by `dilation`, and its clock is as much slower (`time_dilation`). Raises
    LabError or OptionError when it cannot be built anywhere.
    """

    nodes: int = option(4, "Nodes: one namespace each.", "lab")
    gpus_per_node: int = option(1, "Ranks that share a node.", "lab")
    rate: Annotated[str, _RATE] = option(
        "1 Gbit/s", "What each node sends at most, such as '1 Gbit/s'.", "lab"
    )
    intra_rate: Annotated[str, _RATE] = option(
        INTRA_RATE, "What each rank sends at most inside its node.", "lab"
    )
    sites: int = option(1, "Sites that share the nodes, in order.", "lab")
    wan: Annotated[str | None, _RATE] = option(
        None, "What each site sends to others at most, such as '50 Mbit/s'.", "lab"
    )
    leaf: int | None = option(
        None, "Nodes that share a leaf switch; a spine joins the leaves.", "lab"
    )
    oversubscription: float = option(
        1.0, "Rate of all nodes of a leaf over that of its link to the spine.", "lab"
    )
    placement: Literal["packed", "cyclic"] = option(
        "packed", "packed: nodes fill leaf after leaf. cyclic: they take turns.", "lab"
    )
    dilation: int = 1

    def __post_init__(self) -> None:
        for name, count in (("nodes", self.nodes), ("gpus per node", self.gpus_per_node)):
            whole(name, count, 1, error=LabError)
        if self.world_size > launcher.MAX_RANKS:
            raise LabError(
                f"{self.nodes} nodes of {self.gpus_per_node} are {self.world_size} ranks;"
                f" a lab has at most {launcher.MAX_RANKS}"
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
        self._check_leaves()

    def _check_leaves(self) -> None:
        if self.leaf is None:
            if (self.oversubscription, self.placement) != (1.0, "packed"):
                raise LabError("oversubscription and placement need leaf: the nodes of a switch")
            return
        whole("leaf", self.leaf, 1, error=LabError)
        if self.sites > 1:
            raise LabError(f"sites is {self.sites} and leaf is {self.leaf}: a lab has one of them")
        if self.nodes % self.leaf:
            raise LabError(f"{self.nodes} nodes do not divide into leaves of {self.leaf}")
        one_of("placement", self.placement, ("packed", "cyclic"))
        assert self.fabric
        up = self.leaf * _bandwidth("rate", self.rate) / self.oversubscription
        _within("rate of a leaf's link", f"{up * 8e-6:g} Mbit/s", up)

    def slower(self, dilation: str, command: Sequence[str]) -> "Lab":
        """The lab for a command, as much slower as --dilation says. Raises OptionError."""
        times = chosen(dilation, command, self.world_size, launcher.cores(), self.sites)
        return replace(self, dilation=times)

    @property
    def one_switch(self) -> "Lab":
        """The same nodes on one switch: what is probed."""
        return replace(self, sites=1, wan=None, leaf=None, oversubscription=1.0, placement="packed")

    @property
    def arguments(self) -> list[str]:
        """The lab as options of `realrun lab`."""
        words = ["--nodes", str(self.nodes), "--gpus-per-node", str(self.gpus_per_node)]
        words += ["--rate", self.rate, "--intra-rate", self.intra_rate]
        words += ["--dilation", str(self.dilation)]
        if self.leaf:
            words += ["--leaf", str(self.leaf), "--oversubscription", f"{self.oversubscription:g}"]
            words += ["--placement", self.placement]
        return words + (["--sites", str(self.sites), "--wan", self.wan] if self.wan else [])

    @property
    def fabric(self) -> Fabric | None:
        """The leaves as a cluster has them. Raises OptionError for what none can have."""
        if self.leaf is None:
            return None
        return Fabric(Tier(self.leaf, self.oversubscription), placement=self.placement)

    @property
    def uplink(self) -> Uplink | None:
        """What joins switches of nodes, if there are several.

        A leaf passes at once what its nodes may send at once: it adds no burst, and hides none.
        """
        if self.wan is not None:
            far = _bandwidth("rate between sites", self.wan) / self.dilation
            size = max(burst(far), 2 * queue(self.bandwidth)[1])  # whole packets of nodes
            return Uplink("site", self.nodes // self.sites, far, size)
        if self.leaf is None:
            return None
        up = self.leaf * self.bandwidth / self.oversubscription
        return Uplink("leaf", self.leaf, up, self.leaf * burst(self.bandwidth))

    def beyond(self, latency: Seconds) -> dict[str, str]:
        """What `one_switch` as a cluster lacks, by key; between sites messages take `latency`."""
        up = self.uplink
        if up is None:
            return {}
        if self.wan is None:
            return {
                "fabric.leaf.nodes": str(self.leaf),
                "fabric.leaf.oversubscription": f"{self.oversubscription:g}",
                "fabric.placement": self.placement,
            }
        return {
            "sites": str(self.sites),
            "wan.latency": f"{latency:.4g} s",
            "wan.bandwidth": " ".join(self.wan.split()),
            "wan.efficiency": f"{payload_share(self.bandwidth, two=self.sites == _TWO):.4f}",
            "host.wan.size": f"{up.burst} B",
        }

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
    return _within(what, repr(text), value)


def _within(what: str, said: str, value: BytesPerSecond) -> BytesPerSecond:
    """Refuse rates that no lab has."""
    slowest, fastest = 1e6 / 8, 1e11 / 8
    if not slowest <= value <= fastest:
        raise LabError(f"the {what} is {said}; it must be 1 Mbit/s to 100 Gbit/s")
    return value


TOOLS = ("ip", "tc", "unshare", "nsenter", "mount", "taskset")
"""What has to be installed: iproute2 and util-linux."""

_TWO = 2

_UNSHARE = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child=SIGKILL")
_UNSHARE_ALL = (*_UNSHARE, "--mount-proc")
_CLUSTER_FILE = "/dev/shm/cluster.toml"  # noqa: S108 - a file system of our own is mounted there

CLUSTER = "REALRUN_CLUSTER"
"""Environment variable of the ranks with the path of the cluster that the lab states."""

_LATENCIES: tuple[Seconds, Seconds] = (300e-6, 250e-6)
"""Inside nodes and between them, by the clock of the machine."""

_RANKS_PER_CORE = 2
"""With more, the cores are the bottleneck, not the network."""


def run_lab(
    command: Sequence[str],
    lab: Lab,
    *,
    grace: Seconds = launcher.GRACE,
    patience: Seconds = launcher.PATIENCE,
) -> int:
    """Build the lab, run `command` as every rank in it, and give the exit code of `supervise`.

    Ranks have torchrun's environment, REALRUN_CLUSTER, the path of the lab's `stated_cluster`,
    REALRUN_REALTIME, 1 unless it is set, and REALRUN_SITES, if there are several. Stopping this
    process for longer than `patience` ends all. Control-C gives 130 and SIGTERM 143; a reader that
    closes the output ends all with 0. Call it from the main thread. Raises LabError when the lab
    cannot be built here, LaunchError when there is no such command, OptionError when
    REALRUN_REALTIME is neither 0 nor 1, ModuleNotFoundError without torch, whose store the ranks
    meet in.
    """
    one_of(REALTIME, os.environ.get(REALTIME, "1"), ("0", "1"))
    program = launcher.resolved(command)
    if find_spec("torch") is None:  # importing it here would take seconds
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    check_machine()
    if said := _said(lab):
        print(said, file=sys.stderr)  # noqa: T201 - as a command does
    inside = json.dumps([asdict(lab), grace, patience, program])
    code = f"import sys; sys.path[:] = {sys.path!r}; from realrun.lab.lab import _first; _first()"
    outer = processes.started([*_UNSHARE_ALL, sys.executable, "-P", "-c", code, inside], {})
    try:
        with processes.stoppable(), processes.guard_process(patience) as guard:
            guard.put(outer.pid)
            ended = outer.wait()
            if guard.cut():
                return 1
    except processes.Stopped as stopped:
        return stopped.exit_code
    finally:
        _end(outer)
    if ended not in {0, 1, 2}:
        raise LabError(f"the lab itself was killed (its exit code is {ended})")
    return ended


def _said(lab: Lab) -> str | None:
    """What may surprise, on one line."""
    if lab.dilation > 1:
        return (
            f"this lab and its clock run {lab.dilation} times slower than real time (--dilation 1:"
            " real time)"
        )
    if lab.world_size > _RANKS_PER_CORE * launcher.cores():
        shared = counted(launcher.cores(), "core")
        return (
            f"warning: {lab.world_size} ranks share {shared}: transfers, most of all inside a node,"
            " may be slower than the stated rate"
        )
    return None


def check_machine() -> None:
    """Raise LabError unless a lab can be built here."""
    if sys.platform != "linux":
        raise LabError("a lab needs Linux: it is made of network namespaces")
    if os.geteuid() != 0:
        raise LabError("a lab needs root: it makes network namespaces; try sudo")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise LabError(
            f"a lab needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not"
            " installed (packages iproute2 and util-linux)"
        )
    try:
        run_tool([*_UNSHARE_ALL, "true"])
    except LabError as error:
        raise LabError(f"namespaces cannot be made here (in a container?): {error}") from error


def stated_cluster(lab: Lab) -> str:
    """The lab as a cluster file of co2sim: predict with it what the lab will do."""
    sites = f"sites = {lab.sites}\n" if lab.sites > 1 else ""
    rate, intra = (" ".join(text.split()) for text in (lab.rate, lab.intra_rate))
    share = payload_share(lab.bandwidth, two=lab.nodes == _TWO)
    near, far = loopback_burst(lab.loopback) / lab.gpus_per_node, burst(lab.bandwidth)
    slower = f", {lab.dilation} times slower" if lab.dilation > 1 else ""
    inside, between, idle = (duration(time / lab.dilation) for time in (*_LATENCIES, FULLY_IDLE))
    return f"""\
name = "lab: {lab.nodes} nodes of {lab.gpus_per_node} at {rate}"
source = "how the lab is built{slower}"
nodes = {lab.nodes}
gpus_per_node = {lab.gpus_per_node}
{sites}gpu = "virtual"
backend = "gloo"

[host]
one_machine = {{ value = true, source = "all nodes are one machine" }}
fully_idle = {{ value = "{idle}", source = "the pause after which cores of one lab took longest \
to wake up: 5 ms of the machine" }}

[host.intra]
size = {{ value = "{near:.0f} B", source = "burst of tc tbf at each node's loopback, by rank" }}

[host.inter]
size = {{ value = "{far} B", source = "burst of tc tbf at each node's eth0: 2 ms at its rate, \
512 KiB at most" }}

[intra]
bandwidth = {{ value = "{intra}", source = "rate of tc tbf at each node's loopback, per rank" }}
efficiency = {{ value = {LOOPBACK_PAYLOAD / LOOPBACK_FRAME:.4f}, source = "TCP payload of a \
frame of loopback, whose MTU is 65536: {LOOPBACK_PAYLOAD} of the {LOOPBACK_FRAME} bytes counted" }}
latency = {{ value = "{inside}", assumed = true, source = "`realrun probe` on a virtual machine of \
two cores gave 0.2 to 0.5 ms; depends on the machine and its load" }}

[inter]
bandwidth = {{ value = "{rate}", source = "rate of tc tbf at each node's eth0" }}
efficiency = {{ value = {share:.4f}, source = "TCP payload of an Ethernet \
frame: 1500 - 20 (IPv4) - 20 (TCP) - 12 (timestamps) = {PAYLOAD} of the {FRAME} bytes that tbf \
counts, and {ACK} bytes to acknowledge every packet" }}
latency = {{ value = "{between}", assumed = true, source = "`realrun probe` in labs of 1 and 3 \
Gbit/s gave 0.22 to 0.30 ms on a virtual machine of two cores; depends on machine and load" }}
{_stated_leaves(lab)}{_stated_wan(lab, between)}"""


def _stated_leaves(lab: Lab) -> str:
    if lab.leaf is None:
        return ""
    return f"""
[fabric]
placement = "{lab.placement}"

[fabric.leaf]
nodes = {lab.leaf}
oversubscription = {{ value = {lab.oversubscription:g}, source = "rate of tc tbf at both ends of \
each leaf's link: {lab.leaf} times that of a node, divided by this" }}
"""


def _stated_wan(lab: Lab, latency: str) -> str:
    if lab.wan is None:
        return ""
    facts = lab.beyond(0.0)
    return f"""
[wan]
bandwidth = {{ value = "{facts["wan.bandwidth"]}", source = "rate of tc tbf at each site's \
uplink" }}
efficiency = {{ value = "{facts["wan.efficiency"]}", source = "TCP payload of an Ethernet frame, \
as between nodes" }}
latency = {{ value = "{latency}", assumed = true, source = "as between nodes" }}

[host.wan]
size = {{ value = "{facts["host.wan.size"]}", source = "burst of tc tbf at each site's uplink; it \
holds whole packets of nodes" }}
"""


def _end(outer: subprocess.Popen[bytes]) -> None:
    """Kill the lab by its first process, and wait until all of it is gone."""
    if outer.poll() is not None:
        return
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    first = children.read_text().split() if children.exists() else []
    for pid in map(int, first or [str(outer.pid)]):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    outer.wait()


def _first() -> None:
    """Be the first process of the lab: start the one that does the work, and reap all orphans."""
    worker = os.fork()
    if worker == 0:
        sys.exit(_inside(*json.loads(sys.argv[1])))
    while True:
        pid, status = os.wait()
        if pid == worker:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _inside(
    values: Mapping[str, Any], grace: Seconds, patience: Seconds, command: Sequence[str]
) -> int:
    """Build the lab around this process and run the ranks; the exit code."""
    lab = Lab(**values)
    try:
        _state(lab)
        holders = make_nodes(lab)
        ranks: list[processes.RankProcess] = []
        with processes.guard_process(patience) as guard, processes.ranks_killed_at_end(ranks):
            store = launcher.host_store(SWITCH)
            for rank in range(lab.world_size):
                variables = launcher.rank_environment(
                    rank,
                    lab.world_size,
                    local_world_size=lab.gpus_per_node,
                    address=SWITCH,
                    port=store.port,
                )
                enter = processes.entering(holders[rank // lab.gpus_per_node])
                cores = on_cores(rank, lab.world_size, sorted(os.sched_getaffinity(0)))
                if cores:
                    enter += ["taskset", "--cpu-list", ",".join(map(str, cores))]
                stated = {"GLOO_SOCKET_IFNAME": "eth0", CLUSTER: _CLUSTER_FILE}
                stated |= {REALTIME: os.environ.get(REALTIME, "1")}
                stated |= {DILATION: str(lab.dilation)}
                stated |= {SITES: str(lab.sites)} if lab.sites > 1 else {}
                ranks.append(processes.start(rank, [*enter, *command], {**variables, **stated}))
                guard.put(ranks[-1].process.pid)
            return supervise(ranks, store, grace, cut=guard.cut)
    except Co2simError as error:
        print(error_line(str(error)), file=sys.stderr)  # noqa: T201 - the launcher only sees the code
        return 2
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0  # as every command gives then


def _state(lab: Lab) -> None:
    """Write the lab as a cluster file, which only its own processes see."""
    run_tool(["mount", "-t", "tmpfs", "lab", str(Path(_CLUSTER_FILE).parent)])
    Path(_CLUSTER_FILE).write_text(stated_cluster(lab))
