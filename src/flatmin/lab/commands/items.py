"""Everything that ``flatmin reproduce`` can run: the paper's tables and figures, and our own study."""

from flatmin.lab.cheap_sam.study import CHEAP_SAM
from flatmin.lab.foret2021 import items as foret2021
from flatmin.lab.studies.item import Item

ITEMS: dict[str, Item] = {**foret2021.ITEMS, CHEAP_SAM.name: CHEAP_SAM}
