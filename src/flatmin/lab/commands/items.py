"""Everything that ``flatmin reproduce`` can run: the paper's tables and figures, our own study, and the demo."""

from flatmin.lab.cheap_sam.study import CHEAP_SAM
from flatmin.lab.demo.study import DEMO
from flatmin.lab.foret2021.items import ITEMS as PAPER_ITEMS
from flatmin.lab.studies.study import Item

__all__ = ["ITEMS", "PAPER_ITEMS"]

ITEMS: dict[str, Item] = {**PAPER_ITEMS, CHEAP_SAM.name: CHEAP_SAM, DEMO.name: DEMO}
