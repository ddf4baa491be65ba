"""A table or figure of a publication to reproduce."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from flatmin.lab.studies.findings import Findings
from flatmin.lab.sweeps.runners import Runner

Scale = Literal["paper", "laptop", "smoke"]
"""paper: its own settings, on its own data; laptop: small models and real data, on two cores; smoke: seconds."""
SCALES: tuple[Scale, ...] = get_args(Scale)
Study = Callable[[Scale, Runner], Findings]


@dataclass(frozen=True, kw_only=True)
class Item:
    """One table or figure."""

    name: str
    """What ``flatmin reproduce`` calls it."""
    title: str
    source: str
    """Where it is, for example "Table 1, Section 3.1"."""
    study: Study
    """Gets its runs from a laboratory and says what they show."""
