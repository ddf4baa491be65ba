"""The figures of Foret et al. (2021), and the theorem, as items that can be run again."""

from flatmin.lab.papers.ablation_figures import p_norm, second_order
from flatmin.lab.papers.ascent_figures import inner_steps
from flatmin.lab.papers.bound_figures import bound
from flatmin.lab.papers.claims_appendix import ASCENT_STEPS
from flatmin.lab.papers.claims_figures import FIGURES, HESSIAN
from flatmin.lab.papers.hessian_figures import hessian
from flatmin.lab.papers.item import Item, Study
from flatmin.lab.papers.landscape_figures import landscape
from flatmin.lab.papers.predictive_figures import predictive
from flatmin.lab.papers.sharpness_figures import m_and_rho


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
