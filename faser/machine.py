"""What this machine is, as profiles name it: its GPU, or the cores of its CPU.

One decision: the driver's own tool is asked, not torch, which would take seconds and memory on the GPU.
"""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
PATIENCE_S = 20
"""A driver that answers later than this is taken for none."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """name: as the driver says it, `NVIDIA H200`. memory_mib: in all; None where the driver does not say."""

    name: str
    memory_mib: int | None
    driver: str


def gpus() -> list[Gpu]:
    """The NVIDIA GPUs here; none if the driver or its tool is missing or fails."""
    try:
        ran = subprocess.run(QUERY, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in ran.stdout.splitlines()]
    return [Gpu(row[0], int(row[1]) if row[1].isdecimal() else None, row[2]) for row in rows if len(row) == 3]


def cpu() -> str:
    """This CPU as a profile's `device`: the number of its cores, and its name where the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores, {names[0] if names else platform.machine()}"


def device(found: list[Gpu]) -> str:
    """What steps run on here, as a profile's `device`: the first of the GPUs `found`, or the CPU."""
    return found[0].name if found else cpu()
