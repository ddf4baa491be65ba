"""Fingerprints of the files a run reads from outside: its images and the weights it starts from.

Datasets with published checksums (CIFAR, SVHN, Fashion-MNIST) are verified each time they are read and need none.
"""

import hashlib
import os
from pathlib import Path

from flatmin.lab.data.datasets import Dataset
from flatmin.lab.data.images import FileImages
from flatmin.lab.errors import DataError, RunError
from flatmin.lab.runs.environment import read_sessions

MAX_HASHED_BYTES = 2**30  # of larger datasets only names, labels and sizes are compared: reading them takes minutes
IMAGES, WEIGHTS = "image files", "weights file"


def image_fingerprint(dataset: Dataset) -> dict[str, str]:
    """Return the fingerprint of a dataset's image files, as `load_dataset` returns it; nothing if it has none.

    Raises:
        DataError: a file cannot be read.
    """
    parts = [part for part in (dataset.train, dataset.valid, dataset.test) if isinstance(part, FileImages)]
    files = [(path, int(label)) for part in parts for path, label in zip(part.paths, part.labels, strict=True)]
    if not files:
        return {}
    root, digest = os.path.commonpath([path.parent for path, _ in files]), hashlib.sha256()
    try:
        sizes = [path.stat().st_size for path, _ in files]
        whole = sum(sizes) <= MAX_HASHED_BYTES
        for (path, label), size in zip(files, sizes, strict=True):
            digest.update(os.fsencode(f"{os.path.relpath(path, root)} {label} {size}\n"))
            if whole:
                digest.update(path.read_bytes())
    except OSError as error:
        raise DataError(f"An image file cannot be read: {error}. Restore it, or remove it from the dataset.") from error
    return {IMAGES: digest.hexdigest()[:16]}


def weights_fingerprint(path: str | None) -> dict[str, str]:
    """Return the fingerprint of the file that a model starts from; nothing without a file."""
    if path is None or not Path(path).is_file():
        return {}
    return {WEIGHTS: hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]}


def check_inputs(run: Path, now: dict[str, str]) -> None:
    """Compare inputs with those the run recorded; runs from before there were fingerprints recorded none.

    Raises:
        RunError: an input has changed since the run was trained.
    """
    recorded: dict[str, str] = {}
    for session in read_sessions(run):
        inputs = session.get("inputs")
        recorded |= inputs if isinstance(inputs, dict) else {}
    for name in now.keys() & recorded.keys():
        if now[name] != recorded[name]:
            raise RunError(
                f"The {name} of {run} changed after training started: the fingerprint was {recorded[name]} and is "
                f"{now[name]}. Restore the {name}; or, to train with the new ones, move the directory away or choose "
                "another one with --runs."
            )
