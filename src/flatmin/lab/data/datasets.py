"""Reads a dataset through torchvision, splits it and makes its labels noisy.

The only pickled files that are ever read are CIFAR's official batches, by torchvision, after their checksums
were compared here.
"""

import gzip
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flatmin.lab.data.embedded import load_digits, load_python_text
from flatmin.lab.data.images import FileImages, Images, MemoryImages
from flatmin.lab.data.label_noise import noisy_labels, subset, validation_split
from flatmin.lab.data.randomness import Purpose, permutation
from flatmin.lab.data.roots import check_files, find, find_or_download
from flatmin.lab.errors import DataError
from flatmin.lab.spec.datasets import FOLDER_PREFIX, DatasetInfo, dataset_info
from flatmin.lab.spec.experiment import Data

NUM_DIGITS_TEST = 500
FASHION_MNIST_BYTES = 2**26  # more than the largest of its files has
FASHION_MNIST_FILES = {  # md5 of the uncompressed files: packages recompress them
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}

TrainAndTest = tuple[Images, Images]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """What an experiment trains on and is tested on."""

    train: Images
    valid: Images | None
    test: Images
    info: DatasetInfo
    flipped: NDArray[np.int64]
    """Which training examples have a wrong label on purpose (numbers within ``train``)."""


def load_dataset(data: Data, *, data_root: Path | None = None) -> Dataset:
    """Read, split and (if asked) relabel a dataset.

    The validation examples are set apart first, then the subset is drawn, then its labels are made noisy. The test
    labels are not touched, nor (unless asked for) the validation set's. A DataError says what is missing or corrupt.
    """
    info = dataset_info(data.name)
    try:
        train, test = READERS.get(data.name, _as_files)(data, data_root)
    except MemoryError as error:
        raise DataError(f"{data.name} does not fit into memory, or one of its files is corrupt: {error}.") from error
    info = replace(info, num_classes=info.num_classes or int(max(train.labels.max(), test.labels.max())) + 1)

    kept, held_out = validation_split(len(train.labels), data.validation, data.seed)
    valid = train.take(held_out) if len(held_out) else None
    if data.train_size is not None:
        if data.train_size > len(kept):
            raise DataError(
                f"data.train_size is {data.train_size}, but {data.name} has only {len(kept)} training "
                "examples (in addition to the validation split). Choose a smaller number, or None for all."
            )
        kept = kept[subset(len(kept), data.train_size, data.seed)]
    labels, flipped = noisy_labels(train.labels[kept], data.label_noise, info.num_classes, data.seed)
    if data.noisy_validation:
        noisy, _ = noisy_labels(train.labels[held_out], data.label_noise, info.num_classes, data.seed)
        valid = train.take(held_out, noisy)
    return Dataset(train=train.take(kept, labels), valid=valid, test=test, info=info, flipped=flipped)


def _digits(data: Data, data_root: Path | None) -> TrainAndTest:
    images, labels = load_digits()
    # The source has no split of this part, so this one is ours.
    is_test = np.isin(np.arange(len(labels)), permutation(len(labels), 0, Purpose.DIGITS_TEST)[:NUM_DIGITS_TEST])
    return _memory(images[~is_test], labels[~is_test]), _memory(images[is_test], labels[is_test])


def _python_text(data: Data, data_root: Path | None) -> TrainAndTest:
    return _memory(*load_python_text(train=True)), _memory(*load_python_text(train=False))


def _memory(pixels: NDArray[np.uint8], labels: NDArray[np.int64]) -> MemoryImages:
    return MemoryImages(pixels=torch.from_numpy(np.ascontiguousarray(pixels)), labels=labels)


def _cifar(data: Data, data_root: Path | None) -> TrainAndTest:
    datasets, name = _torchvision_datasets(), data.name
    kind = datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100
    root = find_or_download(name, data_root, lambda target: kind(target, download=True))
    checksums = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
    check_files(name, root / kind.base_folder, checksums)

    def read(train: bool) -> MemoryImages:
        part = kind(root, train=train)
        return _memory(part.data.transpose(0, 3, 1, 2), np.asarray(part.targets, dtype=np.int64))

    return read(True), read(False)


def _svhn(data: Data, data_root: Path | None) -> TrainAndTest:
    kind = _torchvision_datasets().SVHN
    splits = ["train", "extra", "test"] if data.extra else ["train", "test"]

    def download(target: Path) -> None:
        for split in splits:
            kind(target, split=split, download=True)

    root = find_or_download("svhn", data_root, download)
    check_files("svhn", root, [(kind.split_list[split][1], kind.split_list[split][2]) for split in splits])
    parts = {split: kind(root, split=split) for split in splits}
    train = [parts[split] for split in splits if split != "test"]
    pixels = np.concatenate([part.data for part in train])
    labels = np.concatenate([part.labels for part in train])
    return _memory(pixels, labels), _memory(parts["test"].data, parts["test"].labels)


def _fashion_mnist(data: Data, data_root: Path | None) -> TrainAndTest:
    directory = find("fashion-mnist", data_root)
    if directory is None:
        kind = _torchvision_datasets().FashionMNIST
        root = find_or_download("fashion-mnist", data_root, lambda target: kind(target, download=True))
        directory = root / "FashionMNIST/raw"
    arrays = {name: _read_idx(directory, name) for name in FASHION_MNIST_FILES}

    def part(prefix: str) -> MemoryImages:
        pixels, labels = arrays[f"{prefix}-images-idx3-ubyte"], arrays[f"{prefix}-labels-idx1-ubyte"]
        return _memory(pixels.reshape(-1, 1, 28, 28), labels.astype(np.int64))

    return part("train"), part("t10k")


READERS = {
    **{"digits": _digits, "python-text": _python_text, "cifar10": _cifar, "cifar100": _cifar, "svhn": _svhn},
    "fashion-mnist": _fashion_mnist,
}
"""Of images that are kept in memory."""


def _read_idx(directory: Path, name: str) -> NDArray[np.uint8]:
    """Return the bytes behind the header of an IDX file (4 bytes of magic, then 4 for each dimension)."""
    raw, packed = directory / name, directory / f"{name}.gz"
    path = raw if raw.is_file() else packed
    try:
        with raw.open("rb") if raw.is_file() else gzip.open(packed) as file:
            content = file.read(FASHION_MNIST_BYTES)  # a small archive may hold gigabytes
    except FileNotFoundError:
        raise DataError(f"{raw} (or {packed.name}) is missing: Fashion-MNIST is incomplete.") from None
    except (OSError, EOFError, gzip.zlib.error) as error:  # type: ignore[attr-defined]
        raise DataError(f"{path} is corrupt or incomplete: {error}. Fetch it again.") from error
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != FASHION_MNIST_FILES[name]:
        raise DataError(
            f"{path} is corrupt or incomplete: the md5 of its content is not "
            f"{FASHION_MNIST_FILES[name]}. Fetch it again."
        )
    return np.frombuffer(content, dtype=np.uint8, offset=4 * (1 + content[3])).copy()


def _as_files(data: Data, data_root: Path | None) -> TrainAndTest:
    size = data.image_size or dataset_info(data.name).size
    pool = ThreadPoolExecutor(max_workers=_decoding_threads(), thread_name_prefix="decode")
    listings = (
        _class_folders(Path(data.name.removeprefix(FOLDER_PREFIX)))
        if data.name.startswith(FOLDER_PREFIX)
        else _listings(data.name, data_root)
    )

    def images(listing: Sequence[tuple[Path, int]]) -> FileImages:
        paths = [path for path, _ in listing]
        missing = next((path for path in paths if not path.is_file()), None)
        if missing is not None:
            raise DataError(f"{missing} is missing: {data.name} is incomplete. Fetch it again.")
        return FileImages(
            paths=paths,
            labels=np.array([label for _, label in listing], dtype=np.int64),
            size=size,
            random_crop=data.augment == "imagenet",
            resize=data.resize,
            crop_padding=data.crop_padding,
            pool=pool,
        )

    return images(listings[0]), images(listings[1])


def _decoding_threads() -> int:
    """Return this worker's share of the host's cores; LOCAL_WORLD_SIZE is torchrun's."""
    return max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


Listing = list[tuple[Path, int]]


def _listings(name: str, data_root: Path | None) -> tuple[Listing, Listing]:
    """Return (file, class) of all training and of all test images of a dataset that torchvision knows."""
    datasets = _torchvision_datasets()
    kinds: dict[str, tuple[Any, tuple[str, ...], str]] = {
        "imagenet": (datasets.ImageNet, ("train",), "val"),
        "aircraft": (datasets.FGVCAircraft, ("trainval",), "test"),
        "flowers102": (datasets.Flowers102, ("train", "val"), "test"),
        "pets": (datasets.OxfordIIITPet, ("trainval",), "test"),
        "cars": (datasets.StanfordCars, ("train",), "test"),
        "food101": (datasets.Food101, ("train",), "test"),
    }
    kind, train_splits, test_split = kinds[name]
    info = dataset_info(name)
    root = find_or_download(name, data_root, lambda target: kind(target, split=test_split, download=True))
    if name == "flowers102":
        check_files(name, root / "flowers-102", [kind._file_dict["label"], kind._file_dict["setid"]])
    if name == "imagenet":
        root = root / "imagenet"

    def listing(split: str) -> Listing:
        try:
            if name == "pets":  # the one without a `loader`
                part = kind(root, split=split)
                return [(Path(path), int(label)) for path, label in zip(part._images, part._labels, strict=True)]
            part = kind(root, split=split, loader=_path_itself)
            return [(Path(path), int(label)) for path, label in (part[i] for i in range(len(part)))]
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{name} in {root} is incomplete or corrupt: {error} It needs {info.files} (source: {info.source})."
            ) from error

    return [pair for split in train_splits for pair in listing(split)], listing(test_split)


def _class_folders(directory: Path) -> tuple[Listing, Listing]:
    """Return (file, class) of PATH/train/CLASS/* and PATH/test/CLASS/*; classes are numbered by name."""
    ImageFolder = _torchvision_datasets().ImageFolder
    parts = []
    for split in ("train", "test"):
        try:
            parts.append(ImageFolder(directory / split, loader=_path_itself))
        except OSError as error:
            raise DataError(
                f"folder:{directory} needs {directory}/train/CLASS/ and {directory}/test/CLASS/ with images: {error}"
            ) from error
    train, test = parts
    if train.classes != test.classes:
        only = sorted(set(train.classes) ^ set(test.classes))
        raise DataError(
            f"{directory}/train and {directory}/test must have the same classes; only one of them has {only}."
        )
    return tuple([(Path(path), label) for path, label in part.samples] for part in parts)  # type: ignore[return-value]


def _path_itself(path: str | Path) -> str | Path:
    return path  # as torchvision's image loader, which then tells file and class of each example, and decodes nothing


def _torchvision_datasets() -> Any:
    # Not at the top: the embedded digits, and with them the demonstration, need no torchvision.
    from flatmin.lab.data.torchvision_operators import torchvision

    return torchvision.datasets
