"""The machine that a rank runs on: in words, and its memory."""

import os
import platform
from pathlib import Path

import torch

from co2sim.units import Bytes
from realrun.execute.world import World, describe


def machine(world: World) -> str:
    """What this ran on, in words: hardware, torch, threads."""
    about = describe(world.device, world.backend)
    hardware = about["hardware"]
    if world.device.type == "cpu":
        lines = Path("/proc/cpuinfo").read_text().splitlines() if _is_linux() else []
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        hardware = f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"
        threads = torch.get_num_threads()
        hardware += f", {threads} thread{'s' if threads > 1 else ''} a rank"
    return f"{hardware}, torch {about['torch']}"


def _is_linux() -> bool:
    return Path("/proc/cpuinfo").is_file()


def memory(world: World) -> Bytes:
    """Memory of one rank: the GPU's, or its share of the node's."""
    if world.device.type == "cuda":
        return float(torch.cuda.get_device_properties(world.device).total_memory)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages / world.layout.gpus_per_node
