"""What the figures, the theorem and the text of Foret et al. (2021) claim, with the numbers that the text gives."""

from collections.abc import Mapping
from typing import NamedTuple

from flatmin.lab.foret2021.claims.appendix import (
    ASCENT_STEPS,
    CIFAR_RHO_005,
    FINETUNING_RHO_005,
    NOISE_VALIDATION,
    SVHN_FASHION,
)
from flatmin.lab.foret2021.claims.tables import CIFAR, FINETUNING, IMAGENET, LABEL_NOISE, statements
from flatmin.lab.studies.printed import Claims, read_cells, table_rows


class TextClaim(NamedTuple):
    """Numbers that stand in the text, or a claim in words that no table has."""

    item: str
    """The table or figure that they are from, as ``flatmin reproduce`` calls it."""
    source: str
    says: str
    numbers: tuple[float, ...]
    """In the order in which `says` has them."""
    note: str
    """Where the tables have them, or what they have instead."""


HESSIAN = Claims(
    source="Figure 3 (left), Section 4.2",
    title="Spectrum of the Hessian along training",
    metric="lambda_max at convergence, and the ratio lambda_max / lambda_5, 'up to'",
    cells=read_cells(
        """
lambda_max          | approximately 24 | approximately 1.0
lambda_max/lambda_5 | up to 11.4       | up to 2.6
""",
        (("sgd",), ("sam",)),
    ),
    statements=statements(
        "SAM converges to lower curvature: lambda_max and lambda_max / lambda_5 are smaller than with SGD.",
        "24 against 1.0, and 11.4 against 2.6; of one model each, as far as the text says.",
    ),
    notes=(
        "The text trains 'for 300 steps' and looks 'at different epochs'; 300 epochs must be meant.",
        "lambda_max is given 'at convergence'; of the ratio the text says only 'up to'.",
    ),
)


def _figure(source: str, title: str, *texts: str, notes: tuple[str, ...] = ()) -> Claims:
    """Return claims in words alone: each with what the paper's own numbers say of it."""
    return Claims(source=source, title=title, statements=statements(*texts), notes=notes)


NO_NUMBERS = "No numbers are given."
FIGURES: Mapping[str, Claims] = {
    "error-reduction": _figure(
        "Figure 1 (left), Section 1",
        "Error reduction by switching to SAM",
        "Switching to SAM reduces the error in the vast majority of conditions.",
        "True in 64 of the 65 conditions of Tables 1, 2 (top-1), 3 and 5 (`error_reductions`).",
        notes=("Which conditions are the figure's points is not listed.",),
    ),
    "landscape": _figure(
        "Figure 1 (middle, right), Section 1",
        "Loss landscapes of SGD and SAM",
        "A ResNet-56 without residual connections converges to a sharp minimum with SGD and a wide one with SAM.",
        NO_NUMBERS,
    ),
    "m-and-rho": _figure(
        "Figure 3 (middle), Section 4.1",
        "Test error over rho for several m",
        "Smaller m gives a lower test error.",
        "No numbers are given; 'tend to'.",
    ),
    "predictive": _figure(
        "Figure 3 (right), Section 4.1",
        "Predictive power of m-sharpness",
        "The smaller m, the more m-sharpness tells of the generalization gap (mutual information).",
        NO_NUMBERS,
    ),
    "second-order": _figure(
        "Figures 4 and 5, Appendix C.4",
        "First- against second-order training",
        "The cosine between first- and second-order updates is close to 1 in the first half of training, and lower "
        "near convergence.",
        NO_NUMBERS,
        "Training without the second-order terms gives the lower test error.",
        "No numbers are given; 'on this example'.",
    ),
    "p-norm": _figure(
        "Figure 6, Appendix C.5",
        "Perturbation norms",
        "Adversarial perturbations (p = 2, p = inf) give a higher test accuracy than random ones, and p = 2 the "
        "highest.",
        "No numbers are given; 'on this example'.",
        notes=(
            "rho / ||.||_2^2, for p = 2 and for random noise, must be rho / ||.||_2: the perturbation has norm rho "
            "(Equation 2 and its footnote).",
        ),
    ),
    "ascent-along-training": _figure(
        "Figure 7, Appendix C.6",
        "Estimated sharpness along training, by ascent steps",
        "For most of training one ascent step finds nearly the loss that several find; near convergence several "
        "find more.",
        "At the end of training Table 11 agrees.",
    ),
    "bound": _figure(
        "Theorem 2, Appendix A.1",
        "The PAC-Bayesian bound",
        "With probability 1 - delta the population loss is at most the largest training loss in the ball of radius "
        "rho plus a term that grows with |w|^2 / rho^2.",
        "No value of the bound is given.",
        "Gaussian noise on the weights of a trained model does not lower its expected error, which the theorem "
        "assumes.",
        "Not measured: 'expected to hold in practice for the final solution'.",
        notes=(
            "The theorem's condition has Gaussian noise of scale rho for each weight; the proof uses it at scale "
            "sigma = rho / (sqrt(k) + sqrt(log n)).",
            "The proof writes KL(P||Q) over the formula of KL(Q||P), which is the one that it needs.",
        ),
    ),
}
"""The claims of figures, and of the theorem, for which there are no numbers."""
CLAIMS: Mapping[str, Claims] = {
    "table1": CIFAR,
    "imagenet": IMAGENET,
    "fine-tuning": FINETUNING,
    "label-noise": LABEL_NOISE,
    "svhn-fashion": SVHN_FASHION,
    "noise-and-rho": NOISE_VALIDATION,
    "rho-0.05": CIFAR_RHO_005,
    "fine-tuning-rho-0.05": FINETUNING_RHO_005,
    "hessian": HESSIAN,
    "inner-steps": ASCENT_STEPS,
    **FIGURES,
}
"""By item, as ``flatmin reproduce`` calls it; Figure 7 is shown with Table 11."""

_IN_TEXT = """
table1 | Section 3.1 | 1.6, 2.2 | SAM lets a simple WideResNet attain 1.6 % test error on CIFAR-10, versus 2.2 % without
  SAM. | Table 1: WRN-28-10 (1800 epochs), AutoAugment.
table1 | Section 3.1 | 10.3 | PyramidNet with ShakeDrop and SAM has 10.3 % error on CIFAR-100. | Table 1: AutoAugment.
svhn-fashion | Section 3.1 and Appendix B.1 | 0.99, 3.59 | SAM lets a simple WideResNet reach 0.99 % error on SVHN and
  3.59 % on Fashion-MNIST. | Table 5: 3.59 is Shake-Shake's; the WideResNet has 3.61.
imagenet | Section 3.1 | 20.3, 18.4 | SAM improves ResNet-152's top-1 error on ImageNet from 20.3 % to 18.4 %. | Table
  2: 200 epochs without SAM, 400 epochs with it.
fine-tuning | Section 3.2 | 84.7, 88.2 | The checkpoints have 84.7 % (EfficientNet-b7) and 88.2 % (EfficientNet-L2)
  accuracy on ImageNet. | Table 3's errors without SAM are the complements.
fine-tuning | Section 3.2 | 0.30, 3.92, 11.39 | SAM yields 0.30 % error on CIFAR-10, 3.92 % on CIFAR-100 and 11.39 % on
  ImageNet. | Table 3: EfficientNet-L2.
inner-steps | Appendix C.6 | 3.0 | On CIFAR-10 the maximum loss found on each batch is about 3 % more with 5 ascent
  steps than with 1. | Table 11 has 2.09 points of error rate more.
table1 | Section 3.1, footnote | - | Training for longer generally did not improve accuracy significantly without SAM,
  except for the models trained for only 200 epochs and for PyramidNet with ShakeDrop. | Table 1 has only the better of
  the two.
fine-tuning | Appendix C.2, footnote | - | There is anecdotal evidence that frozen batch-norm statistics make
  fine-tuning more robust to overtraining. | No numbers are given, and it is not tested here.
"""
IN_TEXT = tuple(
    TextClaim(item, source, says, () if numbers == "-" else tuple(map(float, numbers.split(","))), note)
    for item, source, numbers, says, note in table_rows(_IN_TEXT.replace("\n  ", " "))
)
"""What stands in the text; the numbers of Section 4.2 are in `HESSIAN`."""


def error_reductions() -> dict[str, float]:
    """Return by how many percent of itself the error falls with SAM, for each condition of Tables 1, 2, 3 and 5.

    The left of Figure 1 is drawn from these, as far as it can be told (of Table 2, top-1).

    Example:
        >>> round(error_reductions()["cifar10, WRN-28-10 (200 epochs), basic"], 1)
        22.9
    """
    names = (
        (CIFAR, "{2}, {0}, {1}"),
        (SVHN_FASHION, "{2}, {0}, {1}"),
        (IMAGENET, "imagenet, {0}, {1} epochs"),
        (FINETUNING, "{0}, {1} fine-tuned"),
    )
    return {
        name.format(*key): 100 * (1 - sam.mean / claims.errors(*key[:-1])["SGD", "test_error"].mean)
        for claims, name in names
        for key, sam in claims.cells.items()
        if key[-1] == "sam" and key[-2] != 5  # not the top-5 errors of Table 2
    }


def said_in_text(item: str) -> list[str]:
    """Return what the text says of a table or figure, and where its own numbers are others, for reports."""
    return [f"In its text the paper says ({c.source}): {c.says} {c.note}" for c in IN_TEXT if c.item == item]
