"""The numbers of Section 3 of Foret et al. (2021), verbatim: Tables 1 to 4, laid out as in the paper.

The paper is "Sharpness-Aware Minimization for Efficiently Improving Generalization" (ICLR 2021). The keys are the lab's
names: its datasets (and "birdsnap"), its augmentations, and for methods "sam" and "sgd" (also where the paper says
"Standard Training" or "Baseline"). A statement says what the paper's own numbers make of a claim; the tests count them.
"""

from itertools import product
from typing import NamedTuple

from flatmin.lab.studies.printed import Claimed, Claims, Statement, read_cells, table_rows

METHODS = ("sam", "sgd")
AUGMENTATIONS = ("basic", "cutout", "autoaugment")
CIFAR_ROWS = (
    "WRN-28-10 (200 epochs)",
    "WRN-28-10 (1800 epochs)",
    "Shake-Shake (26 2x96d)",
    "PyramidNet",
    "PyramidNet+ShakeDrop",
)
"""The models of Table 1, as it calls them (Tables 6 and 9 call Shake-Shake "WRN 26-2x6")."""
FINETUNING_DATASETS = (
    "aircraft", "flowers102", "pets", "cars", "cifar10", "cifar100", "birdsnap", "food101", "imagenet",
)  # fmt: skip
FINETUNED = ("efficientnet-b7", "efficientnet-l2")
NOISE_PERCENT = (20, 40, 60, 80)


class PreviousBest(NamedTuple):
    """The state of the art before the paper, as Table 3 gives it."""

    error: Claimed
    method: str
    """As Table 3 abbreviates it; `PREVIOUS_METHODS` has the references."""


def statements(*texts: str) -> tuple[Statement, ...]:
    """Return statements from pairs of texts: a claim, and what the paper's own numbers say of it."""
    return tuple(Statement(claim=c, own_numbers=own) for c, own in zip(texts[::2], texts[1::2], strict=True))


CIFAR = Claims(
    source="Table 1, Section 3.1",
    title="CIFAR-10 and CIFAR-100 from scratch",
    metric="test error, %, mean and 95 % confidence interval of 5 replicas",
    cells=read_cells(
        """
# model                 | augment     | CIFAR-10 SAM | SGD        | CIFAR-100 SAM | SGD
WRN-28-10 (200 epochs)  | basic       | 2.7 ± 0.1    | 3.5 ± 0.1  | 16.5 ± 0.2    | 18.8 ± 0.2
WRN-28-10 (200 epochs)  | cutout      | 2.3 ± 0.1    | 2.6 ± 0.1  | 14.9 ± 0.2    | 16.9 ± 0.1
WRN-28-10 (200 epochs)  | autoaugment | 2.1 ± <0.1   | 2.3 ± 0.1  | 13.6 ± 0.2    | 15.8 ± 0.2
WRN-28-10 (1800 epochs) | basic       | 2.4 ± 0.1    | 3.5 ± 0.1  | 16.3 ± 0.2    | 19.1 ± 0.1
WRN-28-10 (1800 epochs) | cutout      | 2.1 ± 0.1    | 2.7 ± 0.1  | 14.0 ± 0.1    | 17.4 ± 0.1
WRN-28-10 (1800 epochs) | autoaugment | 1.6 ± 0.1    | 2.2 ± <0.1 | 12.8 ± 0.2    | 16.1 ± 0.2
Shake-Shake (26 2x96d)  | basic       | 2.3 ± <0.1   | 2.7 ± 0.1  | 15.1 ± 0.1    | 17.0 ± 0.1
Shake-Shake (26 2x96d)  | cutout      | 2.0 ± <0.1   | 2.3 ± 0.1  | 14.2 ± 0.2    | 15.7 ± 0.2
Shake-Shake (26 2x96d)  | autoaugment | 1.6 ± <0.1   | 1.9 ± 0.1  | 12.8 ± 0.1    | 14.1 ± 0.2
PyramidNet              | basic       | 2.7 ± 0.1    | 4.0 ± 0.1  | 14.6 ± 0.4    | 19.7 ± 0.3
PyramidNet              | cutout      | 1.9 ± 0.1    | 2.5 ± 0.1  | 12.6 ± 0.2    | 16.4 ± 0.1
PyramidNet              | autoaugment | 1.6 ± 0.1    | 1.9 ± 0.1  | 11.6 ± 0.1    | 14.6 ± 0.1
PyramidNet+ShakeDrop    | basic       | 2.1 ± 0.1    | 2.5 ± 0.1  | 13.3 ± 0.2    | 14.5 ± 0.1
PyramidNet+ShakeDrop    | cutout      | 1.6 ± <0.1   | 1.9 ± 0.1  | 11.3 ± 0.1    | 11.8 ± 0.2
PyramidNet+ShakeDrop    | autoaugment | 1.4 ± <0.1   | 1.6 ± <0.1 | 10.3 ± 0.1    | 10.6 ± 0.1
""",
        product(("cifar10", "cifar100"), METHODS),
    ),
    statements=statements(
        "SAM's test error is below SGD's in each of the 30 conditions, though SGD may train twice as long.",
        "True in all 30, and in all 30 the 95 % intervals do not overlap.",
    ),
    notes=(
        "SGD's numbers are the better of the standard and the doubled number of epochs; which one it was is not said.",
        "Without SAM, WRN-28-10 is no better after 1,800 epochs than after 200 in 5 of 6 conditions.",
    ),
)

IMAGENET = Claims(
    source="Table 2, Section 3.1",
    title="ResNets on ImageNet",
    metric="test error, %, mean and 95 % confidence interval of 5 runs",
    cells=read_cells(
        """
# model    | epochs | SAM top-1    | SAM top-5   | standard top-1 | standard top-5
resnet-50  | 100    | 22.5 ± 0.1   | 6.28 ± 0.08 | 22.9 ± 0.1     | 6.62 ± 0.11
resnet-50  | 200    | 21.4 ± 0.1   | 5.82 ± 0.03 | 22.3 ± 0.1     | 6.37 ± 0.04
resnet-50  | 400    | 20.9 ± 0.1   | 5.51 ± 0.03 | 22.3 ± 0.1     | 6.40 ± 0.06
resnet-101 | 100    | 20.2 ± 0.1   | 5.12 ± 0.03 | 21.2 ± 0.1     | 5.66 ± 0.05
resnet-101 | 200    | 19.4 ± 0.1   | 4.76 ± 0.03 | 20.9 ± 0.1     | 5.66 ± 0.04
resnet-101 | 400    | 19.0 ± <0.01 | 4.65 ± 0.05 | 22.3 ± 0.1     | 6.41 ± 0.06
resnet-152 | 100    | 19.2 ± <0.01 | 4.69 ± 0.04 | 20.4 ± <0.0    | 5.39 ± 0.06
resnet-152 | 200    | 18.5 ± 0.1   | 4.37 ± 0.03 | 20.3 ± 0.2     | 5.39 ± 0.07
resnet-152 | 400    | 18.4 ± <0.01 | 4.35 ± 0.04 | 20.9 ± <0.0    | 5.84 ± 0.07
""",
        ((1, "sam"), (5, "sam"), (1, "sgd"), (5, "sgd")),
    ),
    statements=statements(
        "SAM's top-1 and top-5 errors are below standard training's for each depth and number of epochs.",
        "True in all 18 comparisons. At equal computation, SAM for n epochs against standard training "
        "for 2 n, it is true in 11 of 12: ResNet-50's top-1 error is 22.5 after 100 epochs with SAM and 22.3 after "
        "200 without.",
        "With SAM the error keeps falling from 100 to 200 to 400 epochs.",
        "True for all depths, top-1 and top-5.",
        "Without SAM the error rises from 200 to 400 epochs.",
        "True for ResNet-101 and -152; ResNet-50's top-1 error stays at 22.3, and its top-5 error goes "
        "from 6.37 to 6.40, within the intervals. The paper says 'generally'.",
    ),
    notes=(
        "Intervals of '<0.01' and '<0.0' stand next to means with one decimal place; probably '<0.1' was meant.",
        "Standard training after 400 epochs has almost the same row for ResNet-101 (22.3 ± 0.1, 6.41 ± 0.06) as for "
        "ResNet-50 (22.3 ± 0.1, 6.40 ± 0.06), and worse than ResNet-152's (20.9): perhaps a slip.",
        "The text's 'from 20.3 to 18.4' for ResNet-152 compares 200 epochs without SAM with 400 epochs with it.",
    ),
)

_FINETUNING = """
# dataset  | b7 + SAM     | b7           | previous best (ImageNet only) | L2 + SAM     | L2           | previous best
aircraft   | 6.80 ± 0.06  | 8.15 ± 0.08  | 5.3 (TBMSL-Net)               | 4.82 ± 0.08  | 5.80 ± 0.1   | 5.3 (TBMSL-Net)
flowers102 | 0.63 ± 0.02  | 1.16 ± 0.05  | 0.7 (BiT-M)                   | 0.35 ± 0.01  | 0.40 ± 0.02  | 0.37 (EffNet)
pets       | 3.97 ± 0.04  | 4.24 ± 0.09  | 4.1 (Gpipe)                   | 2.90 ± 0.04  | 3.08 ± 0.04  | 4.1 (Gpipe)
cars       | 5.18 ± 0.02  | 5.94 ± 0.06  | 5.0 (TBMSL-Net)               | 4.04 ± 0.03  | 4.93 ± 0.04  | 3.8 (DAT)
cifar10    | 0.88 ± 0.02  | 0.95 ± 0.03  | 1 (Gpipe)                     | 0.30 ± 0.01  | 0.34 ± 0.02  | 0.63 (BiT-L)
cifar100   | 7.44 ± 0.06  | 7.68 ± 0.06  | 7.83 (BiT-M)                  | 3.92 ± 0.06  | 4.07 ± 0.08  | 6.49 (BiT-L)
birdsnap   | 13.64 ± 0.15 | 14.30 ± 0.18 | 15.7 (EffNet)                 | 9.93 ± 0.15  | 10.31 ± 0.15 | 14.5 (DAT)
food101    | 7.02 ± 0.02  | 7.17 ± 0.03  | 7.0 (Gpipe)                   | 3.82 ± 0.01  | 3.97 ± 0.03  | 4.7 (DAT)
imagenet   | 15.14 ± 0.03 | 15.3         | 14.2 (KDforAA)                | 11.39 ± 0.02 | 11.8         | 11.45 (ViT)
"""


FINETUNING = Claims(
    source="Table 3, Section 3.2",
    title="Fine-tuning EfficientNet-b7 and -L2",
    metric="top-1 test error, %, mean and 95 % confidence interval of 5 runs",
    cells=read_cells(
        _FINETUNING,
        (*product((FINETUNED[0],), METHODS), (), *product((FINETUNED[1],), METHODS), ()),
    ),
    statements=statements(
        "Fine-tuning with SAM gives a lower error than without on each dataset, with both models.",
        "True in all 18 comparisons.",
        "In many cases SAM's error is below the best published before.",
        "True on 5 of 9 datasets with b7 (against models that saw ImageNet only) and 8 of 9 with L2; "
        "on 5 of those 8, L2 without SAM is below it too.",
    ),
    notes=(
        "On ImageNet the numbers without SAM, 15.3 and 11.8, have no interval: they are the errors of the checkpoints "
        "themselves (84.7 % and 88.2 % accuracy), not of ten more epochs without SAM.",
    ),
)
PREVIOUS_BEST = {
    (dataset, model): PreviousBest(Claimed.read(best.partition(" (")[0]), best.partition(" (")[2].rstrip(")"))
    for dataset, _, _, *bests in table_rows(_FINETUNING)
    for model, best in zip(FINETUNED, (bests[0], bests[3]), strict=True)
}
"""Table 3's "Prev. SOTA", by dataset and model (b7: with ImageNet alone)."""
_PREVIOUS_METHODS = """
EffNet | Tan & Le (2019)
Gpipe | Huang et al. (2018)
DAT | Ngiam et al. (2018)
BiT-M | Kolesnikov et al. (2020)
BiT-L | Kolesnikov et al. (2020)
KDforAA | Wei et al. (2020)
TBMSL-Net | Zhang et al. (2020)
ViT | Dosovitskiy et al. (2020)
"""
PREVIOUS_METHODS = dict(table_rows(_PREVIOUS_METHODS))

_NOISE_LITERATURE = """
# method                         | 20 % | 40 % | 60 % | 80 %
Sanchez et al. (2019)            | 94.0 | 92.8 | 90.3 | 74.1
Zhang & Sabuncu (2018)           | 89.7 | 87.6 | 82.7 | 67.9
Lee et al. (2019)                | 87.1 | 81.8 | 75.4 | -
Chen et al. (2019)               | 89.7 | -    | -    | 52.3
Huang et al. (2019)              | 92.6 | 90.3 | 43.4 | -
MentorNet (Jiang et al., 2017)   | 92.0 | 91.2 | 74.2 | 60.0
Mixup (Zhang et al., 2017)       | 94.0 | 91.5 | 86.8 | 76.9
MentorMix (Jiang et al., 2019)   | 95.6 | 94.2 | 91.3 | 81.0
"""
_NOISE_OWN = """
# method          | 20 % | 40 % | 60 % | 80 %
SGD               | 84.8 | 68.8 | 48.2 | 26.2
Mixup             | 93.0 | 90.0 | 83.8 | 70.2
Bootstrap + Mixup | 93.3 | 92.0 | 87.6 | 72.0
SAM               | 95.1 | 93.4 | 90.5 | 77.9
Bootstrap + SAM   | 95.4 | 94.2 | 91.8 | 79.9
"""
NOISE_LITERATURE = tuple(row[0] for row in table_rows(_NOISE_LITERATURE))
"""Table 4's upper block, as Jiang et al. (2019) report them."""
NOISE_METHODS = tuple(row[0] for row in table_rows(_NOISE_OWN))
"""Table 4's lower block: the paper's own runs."""

LABEL_NOISE = Claims(
    source="Table 4, Section 3.3",
    title="CIFAR-10 with noisy labels",
    metric="accuracy on the clean test set, %",
    cells=read_cells(_NOISE_LITERATURE.rstrip() + _NOISE_OWN, product(NOISE_PERCENT)),
    statements=statements(
        "SAM alone is more accurate than SGD and Mixup at every noise level.",
        "True at all 4 levels.",
        "SAM alone is more accurate than every earlier method except MentorMix.",
        "True in all 24 numbers there are; by 0.2 points at the least.",
        "Bootstrapping makes SAM more accurate, and comparable to MentorMix.",
        "More accurate at all 4 levels; against MentorMix better at 60 %, equal at 40 %, worse at 20 % and 80 %.",
    ),
    notes=(
        "No intervals are given, nor the number of replicas.",
        "The paper's own Mixup is less accurate than the published one (Zhang et al., 2017) at all 4 levels.",
    ),
)
