"""Every table and figure of Foret et al. (2021).

The paper is "Sharpness-Aware Minimization for Efficiently Improving Generalization" (ICLR 2021), and
``flatmin reproduce NAME --scale SCALE`` runs one of its items again. Its numbers are in `claims`, `claims_appendix` and
`claims_figures`, its settings in `settings`, and where each comes from in `hyperparameters`.
"""

from flatmin.lab.papers import (
    claims,
    claims_appendix,
    claims_figures,
    error_reduction,
    fine_tuning,
    from_scratch,
    label_noise,
)
from flatmin.lab.papers.figures import FIGURE_ITEMS
from flatmin.lab.papers.item import Item

_FIGURES = claims_figures.FIGURES
_TABLE_ITEMS = (
    Item(
        name="error-reduction",
        title=_FIGURES["error-reduction"].title,
        source=_FIGURES["error-reduction"].source,
        study=error_reduction.error_reduction,
    ),
    Item(name="table1", title=claims.CIFAR.title, source=claims.CIFAR.source, study=from_scratch.table1),
    Item(name="imagenet", title=claims.IMAGENET.title, source=claims.IMAGENET.source, study=from_scratch.imagenet),
    Item(
        name="fine-tuning",
        title=claims.FINETUNING.title,
        source=claims.FINETUNING.source,
        study=fine_tuning.fine_tuning,
    ),
    Item(
        name="label-noise",
        title=claims.LABEL_NOISE.title,
        source=claims.LABEL_NOISE.source,
        study=label_noise.label_noise,
    ),
    Item(
        name="svhn-fashion",
        title=claims_appendix.SVHN_FASHION.title,
        source=claims_appendix.SVHN_FASHION.source,
        study=from_scratch.svhn_fashion,
    ),
    Item(
        name="noise-and-rho",
        title=claims_appendix.NOISE_VALIDATION.title,
        source=claims_appendix.NOISE_VALIDATION.source,
        study=label_noise.noise_and_rho,
    ),
    Item(
        name="rho-0.05",
        title=claims_appendix.CIFAR_RHO_005.title,
        source=claims_appendix.CIFAR_RHO_005.source,
        study=from_scratch.cifar_default_rho,
    ),
    Item(
        name="fine-tuning-rho-0.05",
        title=claims_appendix.FINETUNING_RHO_005.title,
        source=claims_appendix.FINETUNING_RHO_005.source,
        study=fine_tuning.fine_tuning_default_rho,
    ),
)
ITEMS = {item.name: item for item in (*_TABLE_ITEMS, *FIGURE_ITEMS)}
