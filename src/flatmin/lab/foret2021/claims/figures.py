"""What the figures, the theorem and the text of Foret et al. (2021) claim, with the numbers that the text gives."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from flatmin.lab.foret2021.claims.appendix import SVHN_FASHION
from flatmin.lab.foret2021.claims.tables import CIFAR, FINETUNING, IMAGENET
from flatmin.lab.studies.printed import Claimed, Claims, Statement


class CurvatureCell(NamedTuple):
    """A number of Section 4.2; `quantity` is "lambda_max" or "lambda_max/lambda_5"."""

    quantity: str
    method: str


@dataclass(frozen=True, kw_only=True)
class FigureClaims:
    """A figure, or a theorem, whose claims are in words alone."""

    source: str
    title: str
    statements: tuple[Statement, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TextClaim:
    """Numbers that stand in the text."""

    item: str
    """The table or figure that they are from, as ``flatmin reproduce`` calls it."""
    source: str
    says: str
    numbers: tuple[float, ...]
    """In the order in which `says` has them."""
    note: str = ""
    """Where the tables have them, or what they have instead."""


HESSIAN = Claims(
    source="Figure 3 (left), Section 4.2",
    title="Spectrum of the Hessian along training",
    metric="eigenvalues at convergence",
    cells=MappingProxyType(
        {
            CurvatureCell("lambda_max", "sgd"): Claimed.read("approximately 24"),
            CurvatureCell("lambda_max", "sam"): Claimed.read("approximately 1.0"),
            CurvatureCell("lambda_max/lambda_5", "sgd"): Claimed.read("up to 11.4"),
            CurvatureCell("lambda_max/lambda_5", "sam"): Claimed.read("up to 2.6"),
        }
    ),
    statements=(
        Statement(
            claim="SAM converges to lower curvature: lambda_max and lambda_max / lambda_5 are smaller than with SGD.",
            own_numbers="24 against 1.0, and 11.4 against 2.6; of one network each, as far as the text says.",
        ),
    ),
    notes=("The text trains 'for 300 steps' and looks 'at different epochs'; 300 epochs must be meant.",),
)

FIGURES: Mapping[str, FigureClaims] = MappingProxyType(
    {
        "error-reduction": FigureClaims(
            source="Figure 1 (left), Section 1",
            title="Error reduction by switching to SAM",
            statements=(
                Statement(
                    claim="Switching to SAM reduces the error in the vast majority of conditions.",
                    own_numbers="True in 64 of the 65 conditions of Tables 1, 2 (top-1), 3 and 5 (`error_reductions`).",
                ),
            ),
            notes=("Which conditions are the figure's points is not listed.",),
        ),
        "landscapes": FigureClaims(
            source="Figure 1 (middle, right), Section 1",
            title="Loss landscapes of SGD and SAM",
            statements=(
                Statement(
                    claim="A ResNet-56 without residual connections converges to a sharp minimum with SGD and to a "
                    "wide one with SAM.",
                    own_numbers="No numbers are given.",
                ),
            ),
        ),
        "m-sharpness": FigureClaims(
            source="Figure 3 (middle), Section 4.1",
            title="Test error over rho for several m",
            statements=(
                Statement(claim="Smaller m gives a lower test error.", own_numbers="No numbers are given; 'tend to'."),
            ),
        ),
        "predictive-power": FigureClaims(
            source="Figure 3 (right), Section 4.1",
            title="Predictive power of m-sharpness",
            statements=(
                Statement(
                    claim="The smaller m, the more m-sharpness tells of the generalization gap (mutual information).",
                    own_numbers="No numbers are given.",
                ),
            ),
        ),
        "second-order": FigureClaims(
            source="Figures 4 and 5, Appendix C.4",
            title="First- against second-order training",
            statements=(
                Statement(
                    claim="The cosine between first- and second-order updates is close to 1 in the first half of "
                    "training, and lower near convergence.",
                    own_numbers="No numbers are given.",
                ),
                Statement(
                    claim="Training without the second-order terms gives the lower test error.",
                    own_numbers="No numbers are given; 'on this example'.",
                ),
            ),
        ),
        "norms": FigureClaims(
            source="Figure 6, Appendix C.5",
            title="Perturbation norms",
            statements=(
                Statement(
                    claim="Adversarial perturbations (p = 2, p = inf) give a higher test accuracy than random ones, "
                    "and p = 2 the highest.",
                    own_numbers="No numbers are given; 'on this example'.",
                ),
            ),
            notes=(
                "rho / ||.||_2^2, for p = 2 and for random noise, must be rho / ||.||_2: the perturbation has norm rho "
                "(Equation 2 and its footnote).",
            ),
        ),
        "ascent-along-training": FigureClaims(
            source="Figure 7, Appendix C.6",
            title="Estimated sharpness along training, by ascent steps",
            statements=(
                Statement(
                    claim="For most of training one ascent step finds nearly the loss that several find; near "
                    "convergence several find more.",
                    own_numbers="At the end of training Table 11 agrees.",
                ),
            ),
        ),
        "bound": FigureClaims(
            source="Theorem 2, Appendix A.1",
            title="The PAC-Bayesian bound",
            statements=(
                Statement(
                    claim="With probability 1 - delta the population loss is at most the largest training loss in the "
                    "ball of radius rho plus a term that grows with |w|^2 / rho^2.",
                    own_numbers="No value of the bound is given.",
                ),
                Statement(
                    claim="Gaussian noise on the weights of a trained network does not lower its expected error, which "
                    "the theorem assumes.",
                    own_numbers="Not measured: 'expected to hold in practice for the final solution'.",
                ),
            ),
            notes=(
                "The theorem's condition has Gaussian noise of scale rho for each weight; the proof uses it at scale "
                "sigma = rho / (sqrt(k) + sqrt(log n)).",
                "The proof writes KL(P||Q) over the formula of KL(Q||P), which is the one that it needs.",
            ),
        ),
    }
)
"""The claims of figures, and of the theorem, for which there are no numbers."""

IN_TEXT = (
    TextClaim(
        item="table1",
        source="Section 3.1",
        says="SAM lets a simple WideResNet attain 1.6 % test error on CIFAR-10, versus 2.2 % without SAM.",
        numbers=(1.6, 2.2),
        note="Table 1: WRN-28-10 (1800 epochs), AutoAugment.",
    ),
    TextClaim(
        item="table1",
        source="Section 3.1",
        says="PyramidNet with ShakeDrop and SAM has 10.3 % error on CIFAR-100.",
        numbers=(10.3,),
        note="Table 1: AutoAugment.",
    ),
    TextClaim(
        item="svhn-fashion",
        source="Section 3.1 and Appendix B.1",
        says="SAM lets a simple WideResNet reach 0.99 % error on SVHN and 3.59 % on Fashion-MNIST.",
        numbers=(0.99, 3.59),
        note="Table 5: 3.59 is Shake-Shake's; the WideResNet has 3.61.",
    ),
    TextClaim(
        item="imagenet",
        source="Section 3.1",
        says="SAM improves ResNet-152's top-1 error on ImageNet from 20.3 % to 18.4 %.",
        numbers=(20.3, 18.4),
        note="Table 2: 200 epochs without SAM, 400 epochs with it.",
    ),
    TextClaim(
        item="fine-tuning",
        source="Section 3.2",
        says="The checkpoints have 84.7 % (EfficientNet-b7) and 88.2 % (EfficientNet-L2) accuracy on ImageNet.",
        numbers=(84.7, 88.2),
        note="Table 3's errors without SAM are the complements.",
    ),
    TextClaim(
        item="fine-tuning",
        source="Section 3.2",
        says="SAM yields 0.30 % error on CIFAR-10, 3.92 % on CIFAR-100 and 11.39 % on ImageNet.",
        numbers=(0.30, 3.92, 11.39),
        note="Table 3: EfficientNet-L2.",
    ),
    TextClaim(
        item="inner-steps",
        source="Appendix C.6",
        says="On CIFAR-10 the maximum loss found on each batch is about 3 % more with 5 ascent steps than with 1.",
        numbers=(3.0,),
        note="Table 11 has 2.09 points of error rate more.",
    ),
)
"""Numbers that stand in the text; those of Section 4.2 are in `HESSIAN`."""


def error_reductions() -> dict[str, float]:
    """Return by how many percent of itself the error falls with SAM, for each condition of Tables 1, 2, 3 and 5.

    These are what the left of Figure 1 is drawn from, as far as it can be told (of Table 2, top-1).

    Example:
        >>> round(error_reductions()["cifar10, WRN-28-10 (200 epochs), basic"], 1)
        22.9
    """
    pairs = {
        f"{key.dataset}, {key.model}, {key.augment}": (claimed, claims[key._replace(method="sgd")])
        for claims in (CIFAR, SVHN_FASHION)
        for key, claimed in claims.cells.items()
        if key.method == "sam"
    }
    pairs |= {
        f"imagenet, {key.model}, {key.epochs} epochs": (claimed, IMAGENET[key._replace(method="sgd")])
        for key, claimed in IMAGENET.cells.items()
        if key.method == "sam" and key.top == 1
    }
    pairs |= {
        f"{key.dataset}, {key.model} fine-tuned": (claimed, FINETUNING[key._replace(method="sgd")])
        for key, claimed in FINETUNING.cells.items()
        if key.method == "sam"
    }
    return {name: 100 * (1 - sam.mean / sgd.mean) for name, (sam, sgd) in pairs.items()}


def said_in_text(item: str) -> list[str]:
    """Return what the text says of a table or figure, and where its own numbers are others, for people."""
    return [f"In its text the paper says ({c.source}): {c.says} {c.note}" for c in IN_TEXT if c.item == item]
