"""Where a session of a run takes place: versions, hardware, commit."""

import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import flatmin

PACKAGES = ("torchvision", "timm", "numpy", "scipy")


def environment() -> dict[str, Any]:
    """Return the facts of this machine that a result may depend on."""
    facts: dict[str, Any] = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "flatmin": flatmin.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,  # which names the build, unlike the metadata of the package
        "platform": platform.platform(),
        "cpu": torch.cpu.get_capabilities().get("cpu_name", platform.processor()),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = None
    return facts


def _commit() -> str | None:
    """Return the commit that flatmin was imported from, with a + behind it where files differ; None outside of git."""
    try:
        if not _git("ls-files", "__init__.py"):
            return None  # installed inside of somebody else's repository
        return _git("rev-parse", "HEAD") + ("+" if _git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    command = ["git", "-C", str(Path(flatmin.__file__).parent), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
