"""Every table and figure of Foret et al. (2021).

The paper is "Sharpness-Aware Minimization for Efficiently Improving Generalization" (ICLR 2021), and
``flatmin reproduce NAME --scale SCALE`` runs one of its items. Its numbers are in `claims`, its settings in `settings`,
and where each comes from in `sources`.
"""

from typing import Any

from flatmin.lab.foret2021.claims import appendix as claims_appendix
from flatmin.lab.foret2021.claims import tables as claims
from flatmin.lab.foret2021.claims.figures import FIGURES
from flatmin.lab.foret2021.figures.items import FIGURE_ITEMS
from flatmin.lab.foret2021.tables import error_reduction, fine_tuning, from_scratch, imagenet, label_noise
from flatmin.lab.studies.item import Item, Study
from flatmin.lab.studies.printed import Claims


def _item(name: str, about: Claims[Any], study: Study) -> Item:
    return Item(name=name, title=about.title, source=about.source, study=study)


TABLE_ITEMS = (
    _item("error-reduction", FIGURES["error-reduction"], error_reduction.error_reduction),
    _item("table1", claims.CIFAR, from_scratch.table1),
    _item("imagenet", claims.IMAGENET, imagenet.imagenet),
    _item("fine-tuning", claims.FINETUNING, fine_tuning.fine_tuning),
    _item("label-noise", claims.LABEL_NOISE, label_noise.label_noise),
    _item("svhn-fashion", claims_appendix.SVHN_FASHION, from_scratch.svhn_fashion),
    _item("noise-and-rho", claims_appendix.NOISE_VALIDATION, label_noise.noise_and_rho),
    _item("rho-0.05", claims_appendix.CIFAR_RHO_005, from_scratch.cifar_default_rho),
    _item("fine-tuning-rho-0.05", claims_appendix.FINETUNING_RHO_005, fine_tuning.fine_tuning_default_rho),
)
"""The tables, and the figure that is drawn from them, in the paper's order."""
ITEMS = {item.name: item for item in (*TABLE_ITEMS, *FIGURE_ITEMS)}
