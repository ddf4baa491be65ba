"""The figures of Foret et al. (2021), and the theorem, as items to reproduce."""

from flatmin.lab.foret2021.claims.appendix import ASCENT_STEPS
from flatmin.lab.foret2021.claims.figures import FIGURES, HESSIAN
from flatmin.lab.foret2021.figures.bound import bound
from flatmin.lab.foret2021.figures.hessian import hessian
from flatmin.lab.foret2021.figures.inner_steps import inner_steps
from flatmin.lab.foret2021.figures.landscape import landscape
from flatmin.lab.foret2021.figures.m_and_rho import m_and_rho
from flatmin.lab.foret2021.figures.p_norm import p_norm
from flatmin.lab.foret2021.figures.predictive import predictive
from flatmin.lab.foret2021.figures.second_order import second_order
from flatmin.lab.studies.item import Item, Study


def _item(name: str, claims: str, study: Study) -> Item:
    return Item(name=name, title=FIGURES[claims].title, source=FIGURES[claims].source, study=study)


FIGURE_ITEMS: tuple[Item, ...] = (
    _item("landscape", "landscapes", landscape),
    Item(name="hessian", title=HESSIAN.title, source=HESSIAN.source, study=hessian),
    _item("m-and-rho", "m-sharpness", m_and_rho),
    _item("predictive", "predictive-power", predictive),
    _item("second-order", "second-order", second_order),
    _item("p-norm", "norms", p_norm),
    Item(name="inner-steps", title=ASCENT_STEPS.title, source=ASCENT_STEPS.source, study=inner_steps),
    _item("bound", "bound", bound),
)
"""In the paper's order; Figure 1 (left) is drawn from the tables."""
