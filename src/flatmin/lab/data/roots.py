"""Finds datasets on disk, fetches them where that is possible, and compares checksums."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import platformdirs

from flatmin.lab.errors import DataError
from flatmin.lab.spec.datasets import DATASETS, dataset_info

ENVIRONMENT_VARIABLE = "FLATMIN_DATA"
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # the package dataset-fashion-mnist


def search_path(data_root: Path | None = None) -> list[Path]:
    """Return the directories that are searched for datasets, best first.

    They are ``data_root`` (``--data-root``), the environment's FLATMIN_DATA, ./data and the user's cache.
    """
    roots = [data_root] if data_root is not None else []
    if os.environ.get(ENVIRONMENT_VARIABLE):
        roots.append(Path(os.environ[ENVIRONMENT_VARIABLE]))
    return [*roots, Path("data"), platformdirs.user_cache_path("flatmin", appauthor=False) / "data"]


def find(name: str, data_root: Path | None = None) -> Path | None:
    """Return the directory that holds a dataset (its files are not looked at), or None.

    An empty directory of the right name does not count: a failed download leaves one.
    """
    if name == "fashion-mnist":  # as torchvision puts its files, as its authors do, or as Debian does
        places = [root / place for root in search_path(data_root) for place in ("FashionMNIST/raw", "fashion-mnist")]
        folders = (*places, DEBIAN_FASHION_MNIST)
        return next((folder for folder in folders if any(folder.glob("train-images-idx3-ubyte*"))), None)
    marker = DATASETS[name].marker
    return next((root for root in search_path(data_root) if _holds_something(root / marker)), None)


def find_or_download(name: str, data_root: Path | None, download: Callable[[Path], object]) -> Path:
    """Return the directory that holds a dataset; fetch it if there is none and torchvision can.

    If that fails, a DataError says which files to put where.
    """
    info, roots = DATASETS[name], search_path(data_root)
    if present := [root for root in roots if _holds_something(root / info.marker)]:
        return present[0]
    explicit = data_root is not None or os.environ.get(ENVIRONMENT_VARIABLE)
    target = roots[0] if explicit else roots[-1]
    reason = "It has to be fetched by hand."
    if info.downloadable:
        try:
            _download_whole(download, target, info.marker)
            return target
        except (OSError, RuntimeError) as error:  # no connection, no room, a wrong checksum
            reason = f"Downloading it failed ({type(error).__name__}: {error})."
    raise DataError(
        f"{name} is in none of {', '.join(str(r) for r in roots)}. {reason} Put {info.files} into {target} "
        f"(source: {info.source}), or name the directory that holds them with --data-root or {ENVIRONMENT_VARIABLE}."
    )


def _download_whole(download: Callable[[Path], object], target: Path, marker: str) -> None:
    """Download to a temporary directory, then move it: half a dataset must not be taken for a complete one."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=target) as aside:
        download(Path(aside))
        first_part = Path(marker).parts[0]
        for child in sorted(Path(aside).iterdir(), key=lambda path: path.name == first_part):  # the marker last
            _move_into(child, target / child.name)


def _move_into(source: Path, target: Path) -> None:
    if source.is_dir() and target.is_dir():
        for child in source.iterdir():
            _move_into(child, target / child.name)
    else:
        shutil.move(source, target)


def _holds_something(path: Path) -> bool:
    return path.is_file() or (path.is_dir() and any(path.iterdir()))


def check_files(name: str, directory: Path, checksums: Iterable[tuple[str, str]]) -> None:
    """Compare files with their md5 checksums; a DataError names one that is missing or differs."""
    for relative, md5 in checksums:
        path = directory / relative
        if not path.is_file():
            raise DataError(f"{path} is missing: {name} is incomplete. {_fix(name)}")
        if file_md5(path) != md5:
            raise DataError(f"{path} is corrupt or incomplete: its md5 is not {md5}. {_fix(name)}")


def file_md5(path: Path) -> str:
    """Return the md5 of a file as hexadecimal digits."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()


def _fix(name: str) -> str:
    return f"Remove it and fetch it again (source: {dataset_info(name).source}). Nothing was trained on it."
