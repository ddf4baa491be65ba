"""Every table and figure of Foret et al. (2021).

The paper is "Sharpness-Aware Minimization for Efficiently Improving Generalization" (ICLR 2021), and
``flatmin reproduce NAME --scale SCALE`` runs one of its items. Its numbers are in `claims`, its settings in `settings`,
and where each comes from in `sources`.
"""

from flatmin.lab.foret2021.figures.bound import BOUND
from flatmin.lab.foret2021.figures.hessian import SPECTRA
from flatmin.lab.foret2021.figures.inner_steps import INNER_STEPS
from flatmin.lab.foret2021.figures.landscape import LANDSCAPE
from flatmin.lab.foret2021.figures.m_and_rho import M_AND_RHO
from flatmin.lab.foret2021.figures.p_norm import P_NORM
from flatmin.lab.foret2021.figures.predictive import PREDICTIVE
from flatmin.lab.foret2021.figures.second_order import SECOND_ORDER_TERMS
from flatmin.lab.foret2021.tables.error_reduction import ERROR_REDUCTION
from flatmin.lab.foret2021.tables.fine_tuning import FINE_TUNING, FINE_TUNING_DEFAULT_RHO
from flatmin.lab.foret2021.tables.from_scratch import DEFAULT_RHO, SVHN_AND_FASHION, TABLE1
from flatmin.lab.foret2021.tables.imagenet import IMAGENET
from flatmin.lab.foret2021.tables.label_noise import TABLE4, TABLE8

TABLES = (
    *(ERROR_REDUCTION, TABLE1, IMAGENET, FINE_TUNING, TABLE4, SVHN_AND_FASHION, TABLE8, DEFAULT_RHO),
    FINE_TUNING_DEFAULT_RHO,
)
"""The tables, and the figure that is drawn from them, in the paper's order."""
FIGURES = (LANDSCAPE, SPECTRA, M_AND_RHO, PREDICTIVE, SECOND_ORDER_TERMS, P_NORM, INNER_STEPS, BOUND)
"""The other figures, and the theorem."""
ITEMS = {item.name: item for item in (*TABLES, *FIGURES)}
