"""What the sessions of a run record: versions, hardware, commit, number of workers, and the files they read.

Images and initial weights are fingerprinted. Datasets with published checksums (CIFAR, SVHN, Fashion-MNIST)
are verified each time they are read and need none.
"""

import hashlib
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import flatmin
from flatmin.lab.data.datasets import Dataset
from flatmin.lab.data.images import FileImages
from flatmin.lab.errors import DataError, RunError
from flatmin.lab.runs.json_files import read_json

PACKAGES = ("torchvision", "timm", "numpy", "scipy")
MAX_HASHED_BYTES = 2**30  # of larger datasets only names, labels and sizes are compared: reading them takes minutes
IMAGES, WEIGHTS = "image files", "weights file"
Fingerprint = dict[str, str]
"""``content``: names, labels, sizes and bytes of all files; ``times``: when they were changed."""


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


def read_sessions(path: Path) -> list[dict[str, Any]]:
    """Read where the sessions of a run took place, the latest last; none if that is not known."""
    try:
        return list(read_json(path / "environment.json")["sessions"])
    except FileNotFoundError:
        return []


def check_sessions(path: Path, num_workers: int, finished: bool) -> None:
    """Reject the result of another number of workers; warn if an unfinished run resumes in another way."""
    sessions = read_sessions(path)
    threads = [session["num_threads"] for session in sessions if "num_threads" in session]
    if not finished and threads and threads[-1] != torch.get_num_threads() and not torch.cuda.is_available():
        warnings.warn(
            f"{path} was trained with {threads[-1]} threads so far and resumes with "
            f"{torch.get_num_threads()}: the result may differ slightly from an uninterrupted run's. Set "
            f"OMP_NUM_THREADS={threads[-1]} for the same.",
            stacklevel=2,
        )
    earlier = {session["num_workers"] for session in sessions if "num_workers" in session}
    if earlier <= {num_workers}:
        return
    before, now = " and ".join(map(_workers, sorted(earlier))), _workers(num_workers)
    if not finished:
        warnings.warn(f"{path} was started by {before} and resumes with {now}.", stacklevel=2)
    elif num_workers not in earlier:
        # Batch norm sees the examples of one worker together, and with SAM they share one perturbation.
        number = max(earlier)
        same = f"with torchrun --nproc-per-node {number}" if number > 1 else "without torchrun"
        raise RunError(
            f"{path} was trained by {before}, but now there {'is' if num_workers == 1 else 'are'} {now}, "
            f"which is a different experiment. For the existing result rerun the command {same}; to train again choose "
            "another directory with --runs."
        )


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count > 1 else ''}"


def _commit() -> str | None:
    """Return the commit of flatmin, with a trailing + if there are uncommitted changes; None outside of git."""
    try:
        if not _git("ls-files", "__init__.py"):
            return None  # installed inside of somebody else's repository
        return _git("rev-parse", "HEAD") + ("+" if _git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    # Without optional locks: a run that is killed now must not leave one in the repository.
    command = ["git", "--no-optional-locks", "-C", str(Path(flatmin.__file__).parent), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def recorded_inputs(run: Path) -> dict[str, Fingerprint]:
    """Return the fingerprints that the sessions of a run recorded."""
    recorded: dict[str, Fingerprint] = {}
    for session in read_sessions(run):
        recorded |= session.get("inputs", {})
    return recorded


def check_inputs(run: Path, dataset: Dataset | None, weights_file: str | None = None) -> dict[str, Fingerprint]:
    """Compare inputs with those the run recorded, and return their fingerprints; a RunError names what has changed.

    Files whose sizes and times are as recorded are not read.
    """
    recorded, found = recorded_inputs(run), {}
    parts = [] if dataset is None else [dataset.train, dataset.valid, dataset.test]
    sets = [part for part in parts if isinstance(part, FileImages)]
    images = [(path, int(label)) for part in sets for path, label in zip(part.paths, part.labels, strict=True)]
    weights = [(Path(weights_file), 0)] if weights_file is not None and Path(weights_file).is_file() else []
    for name, files in ((IMAGES, images), (WEIGHTS, weights)):
        if not files:
            continue
        before = recorded.get(name, {})
        found[name] = _fingerprint(files, before)
        if before and before["content"] != found[name]["content"]:
            raise RunError(
                f"The {name} of {run} changed after training started: the fingerprint was {before['content']} and is "
                f"{found[name]['content']}. Restore the {name}; or, to train with the new ones, move the directory "
                "away or choose another one with --runs."
            )
    return found


def _fingerprint(files: Sequence[tuple[Path, int]], before: Fingerprint) -> Fingerprint:
    root = os.path.commonpath([path.parent for path, _ in files])
    content, times = hashlib.sha256(), hashlib.sha256()
    try:
        facts = [path.stat() for path, _ in files]
        for (path, label), fact in zip(files, facts, strict=True):
            line = os.fsencode(f"{os.path.relpath(path, root)} {label} {fact.st_size}\n")
            content.update(line)
            times.update(line + str(fact.st_mtime_ns).encode())
        if times.hexdigest()[:16] == before.get("times"):
            return before
        if len(files) == 1 or sum(fact.st_size for fact in facts) <= MAX_HASHED_BYTES:
            for path, _ in files:
                content.update(path.read_bytes())
    except OSError as error:
        raise DataError(f"A file cannot be read: {error}. Restore it, or remove it from the dataset.") from error
    return {"content": content.hexdigest()[:16], "times": times.hexdigest()[:16]}
