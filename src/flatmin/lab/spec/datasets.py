"""What is known of each dataset without reading it: classes, image size, statistics, source."""

from dataclasses import dataclass
from functools import partial
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
    channels: int = 3
    """Color channels."""
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


_in_memory = partial(DatasetInfo, in_memory=True, policy="cifar10")
DATASETS: dict[str, DatasetInfo] = {
    "digits": _in_memory(
        title="UCI handwritten digits (E. Alpaydin, C. Kaynak), 1,797 images, inside the package",
        num_classes=10,
        channels=1,
        size=8,
        mean=(0.3045,),
        std=(0.3760,),
    ),
    "cifar10": _in_memory(
        title="CIFAR-10 (Krizhevsky, 2009), 50,000 + 10,000 images",
        num_classes=10,
        size=32,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        marker="cifar-10-batches-py",
        files="cifar-10-batches-py/ (from cifar-10-python.tar.gz)",
        source="https://www.cs.toronto.edu/~kriz/cifar.html",
    ),
    "cifar100": _in_memory(
        title="CIFAR-100 (Krizhevsky, 2009), 50,000 + 10,000 images",
        num_classes=100,
        size=32,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        marker="cifar-100-python",
        files="cifar-100-python/ (from cifar-100-python.tar.gz)",
        source="https://www.cs.toronto.edu/~kriz/cifar.html",
    ),
    "svhn": _in_memory(
        title="SVHN (Netzer et al., 2011), 73,257 + 26,032 images, and 531,131 with --data.extra",
        num_classes=10,
        size=32,
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
        policy="svhn",
        marker="train_32x32.mat",
        files="train_32x32.mat, test_32x32.mat and, with --data.extra, extra_32x32.mat",
        source="http://ufldl.stanford.edu/housenumbers/",
    ),
    "fashion-mnist": _in_memory(
        title="Fashion-MNIST (Xiao et al., 2017), 60,000 + 10,000 images",
        num_classes=10,
        channels=1,
        size=28,
        mean=(0.2860,),
        std=(0.3530,),
        marker="FashionMNIST/raw",
        files="FashionMNIST/raw/ with {train,t10k}-{images-idx3,labels-idx1}-ubyte or the same with .gz "
        "(or, on Debian, the package dataset-fashion-mnist)",
        source="https://github.com/zalandoresearch/fashion-mnist",
    ),
    "imagenet": DatasetInfo(
        title="ImageNet (ILSVRC 2012), 1,281,167 + 50,000 images",
        num_classes=1000,
        marker="imagenet",
        files="imagenet/ with ILSVRC2012_devkit_t12.tar.gz, ILSVRC2012_img_{train,val}.tar",
        source="https://image-net.org (after registration)",
        downloadable=False,
    ),
    "aircraft": DatasetInfo(
        title="FGVC Aircraft (Maji et al., 2013), 100 variants, 6,667 + 3,333 images",
        num_classes=100,
        marker="fgvc-aircraft-2013b",
        files="fgvc-aircraft-2013b/ (from fgvc-aircraft-2013b.tar.gz)",
        source="https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/",
    ),
    "flowers102": DatasetInfo(
        title="Oxford Flowers-102 (Nilsback, Zisserman, 2008), 2,040 + 6,149 images",
        num_classes=102,
        marker="flowers-102",
        files="flowers-102/ with jpg/ (from 102flowers.tgz), imagelabels.mat and setid.mat",
        source="https://www.robots.ox.ac.uk/~vgg/data/flowers/102/",
    ),
    "pets": DatasetInfo(
        title="Oxford-IIIT Pets (Parkhi et al., 2012), 3,680 + 3,669 images",
        num_classes=37,
        marker="oxford-iiit-pet",
        files="oxford-iiit-pet/ with images/ and annotations/ (from images.tar.gz and annotations.tar.gz)",
        source="https://www.robots.ox.ac.uk/~vgg/data/pets/",
    ),
    "cars": DatasetInfo(
        title="Stanford Cars (Krause et al., 2013), 8,144 + 8,041 images",
        num_classes=196,
        marker="stanford_cars",
        files="stanford_cars/ with devkit/, cars_train/, cars_test/ and cars_test_annos_withlabels.mat",
        source="a mirror: its original address no longer answers",
        downloadable=False,
    ),
    "food101": DatasetInfo(
        title="Food-101 (Bossard et al., 2014), 75,750 + 25,250 images",
        num_classes=101,
        marker="food-101",
        files="food-101/ (from food-101.tar.gz)",
        source="https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/",
    ),
}
"""Every dataset by name; Birdsnap, and anything else, is ``folder:PATH``."""


def dataset_info(name: str) -> DatasetInfo:
    """Return what is known of a dataset; of a directory, only that it holds photographs."""
    if name.startswith(FOLDER_PREFIX):
        return DatasetInfo(title=f"class directories in {name.removeprefix(FOLDER_PREFIX)}", num_classes=0)
    return DATASETS[name]
