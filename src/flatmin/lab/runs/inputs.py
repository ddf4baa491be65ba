"""Fingerprints of the files a run reads from outside: its images and the weights it starts from.

Datasets with published checksums (CIFAR, SVHN, Fashion-MNIST) are verified each time they are read and need none.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from flatmin.lab.data.datasets import Dataset
from flatmin.lab.data.images import FileImages
from flatmin.lab.errors import DataError, RunError
from flatmin.lab.runs.environment import read_sessions

MAX_HASHED_BYTES = 2**30  # of larger datasets only names, labels and sizes are compared: reading them takes minutes
IMAGES, WEIGHTS = "image files", "weights file"
Fingerprint = dict[str, str]
"""``content``: names, labels, sizes and bytes of all files; ``times``: when they were changed."""


def recorded_inputs(run: Path) -> dict[str, Fingerprint]:
    """Return the fingerprints that the sessions of a run recorded."""
    recorded: dict[str, Fingerprint] = {}
    for session in read_sessions(run):
        recorded |= session.get("inputs", {})
    return recorded


def check_inputs(run: Path, dataset: Dataset | None, weights_file: str | None = None) -> dict[str, Fingerprint]:
    """Compare inputs with those the run recorded, and return their fingerprints.

    Files whose sizes and times are as recorded are not read.

    Raises:
        RunError: an input has changed since the run was trained.
        DataError: a file cannot be read.
    """
    recorded, found = recorded_inputs(run), {}
    for name, files in ((IMAGES, _image_files(dataset)), (WEIGHTS, _weights_files(weights_file))):
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


def _image_files(dataset: Dataset | None) -> list[tuple[Path, int]]:
    parts = [] if dataset is None else [dataset.train, dataset.valid, dataset.test]
    images = [part for part in parts if isinstance(part, FileImages)]
    return [(path, int(label)) for part in images for path, label in zip(part.paths, part.labels, strict=True)]


def _weights_files(file: str | None) -> list[tuple[Path, int]]:
    return [] if file is None or not Path(file).is_file() else [(Path(file), 0)]


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
