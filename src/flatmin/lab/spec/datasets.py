"""What is known of each dataset without reading it: classes, image size, statistics, source."""

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

FOLDER_PREFIX = "folder:"

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PHOTOGRAPH_SIZE = 224


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """A dataset, as far as it is known before it is read."""

    title: str
    """Name, source and number of images."""
    num_classes: int
    """Number of classes; 0 where only the directory knows."""
    num_train: int = 0
    """Number of training images; 0 where only the directory knows."""
    channels: int = 3
    size: int = PHOTOGRAPH_SIZE
    """Side of the model's input in pixels, where the experiment does not say."""
    in_memory: bool = False
    """Whether all images have this size and are kept in memory as uint8."""
    mean: tuple[float, ...] = IMAGENET_MEAN
    """Mean of the training images, in [0, 1]; ImageNet's for photographs."""
    std: tuple[float, ...] = IMAGENET_STD
    """Standard deviation of the training images."""
    policy: Literal["cifar10", "svhn", "imagenet"] = "imagenet"
    """Which AutoAugment policy belongs to it."""
    marker: str = ""
    """File or directory by which the dataset is recognized in a data directory."""
    files: str = ""
    """What has to be in the data directory, for the error that says what to put where."""
    source: str = ""
    """Where to find it."""
    downloadable: bool = True
    """Whether torchvision can fetch it."""


DATASETS: dict[str, DatasetInfo] = {
    name: DatasetInfo(**{key: tuple(v) if isinstance(v, list) else v for key, v in facts.items()})  # type: ignore[arg-type]
    for name, facts in json.loads(files("flatmin.lab.spec").joinpath("datasets.json").read_text()).items()
}
"""Every dataset by name; Birdsnap, and anything else, is ``folder:PATH``."""


def dataset_info(name: str) -> DatasetInfo:
    """Return what is known of a dataset; of a directory, only that it holds photographs."""
    if name.startswith(FOLDER_PREFIX):
        return DatasetInfo(title=f"class directories in {name.removeprefix(FOLDER_PREFIX)}", num_classes=0)
    return DATASETS[name]
