"""Every table and figure of Foret et al. (2021).

The paper is "Sharpness-Aware Minimization for Efficiently Improving Generalization" (ICLR 2021), and
``flatmin reproduce NAME --scale SCALE`` runs one of its items. Its numbers are in `claims`, its settings in `settings`,
and where each comes from in `sources`.
"""

from flatmin.lab.foret2021.claims.figures import CLAIMS
from flatmin.lab.foret2021.figures.bound import bound
from flatmin.lab.foret2021.figures.hessian import hessian
from flatmin.lab.foret2021.figures.inner_steps import inner_steps
from flatmin.lab.foret2021.figures.landscape import landscape
from flatmin.lab.foret2021.figures.m_and_rho import m_and_rho
from flatmin.lab.foret2021.figures.p_norm import p_norm
from flatmin.lab.foret2021.figures.predictive import predictive
from flatmin.lab.foret2021.figures.second_order import second_order
from flatmin.lab.foret2021.tables import error_reduction, fine_tuning, from_scratch, imagenet, label_noise
from flatmin.lab.studies.item import Item, Study

TABLES: dict[str, Study] = {
    "error-reduction": error_reduction.error_reduction,
    "table1": from_scratch.table1,
    "imagenet": imagenet.imagenet,
    "fine-tuning": fine_tuning.fine_tuning,
    "label-noise": label_noise.label_noise,
    "svhn-fashion": from_scratch.svhn_fashion,
    "noise-and-rho": label_noise.noise_and_rho,
    "rho-0.05": from_scratch.cifar_default_rho,
    "fine-tuning-rho-0.05": fine_tuning.fine_tuning_default_rho,
}
"""The tables, and the figure that is drawn from them, in the paper's order."""
FIGURES: dict[str, Study] = {
    "landscape": landscape,
    "hessian": hessian,
    "m-and-rho": m_and_rho,
    "predictive": predictive,
    "second-order": second_order,
    "p-norm": p_norm,
    "inner-steps": inner_steps,
    "bound": bound,
}
"""The other figures, and the theorem."""
ITEMS = {
    name: Item(name=name, title=CLAIMS[name].title, source=CLAIMS[name].source, study=study)
    for name, study in (TABLES | FIGURES).items()
}
