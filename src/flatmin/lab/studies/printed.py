"""The words in which a publication's claims are kept: numbers as printed, statements, and where they stand."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

Key = TypeVar("Key")

_PRINTED = re.compile(
    r"(?P<qualifier>approximately|up to|about)?\s*(?P<mean>\d+(?:\.\d+)?)"
    r"(?:\s*±\s*(?P<below><)?(?P<spread>\d+(?:\.\d+)?))?"
)


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """A published number, which prints as it was printed.

    Example:
        >>> Claimed.read("5.80 ± 0.1")
        Claimed(mean=5.8, ci=0.1, ci_below=False, std=None, qualifier='', digits=2, spread_digits=1)
        >>> Claimed.read("2.1 ± <0.1").printed()
        '2.1 ± <0.1'
    """

    mean: float
    """The number itself."""
    ci: float | None = None
    """Half the width of its 95 % confidence interval; None where none is given."""
    ci_below: bool = False
    """Whether the interval is only said to be narrower: "± <0.1"."""
    std: float | None = None
    """The standard deviation over runs, where that is what follows the "±"."""
    qualifier: str = ""
    """For example "approximately", "up to"."""
    digits: int = 1
    """Decimal places of the mean, as printed."""
    spread_digits: int = 1
    """Decimal places of what follows the "±"."""

    @classmethod
    def read(cls, text: str, spread: Literal["ci", "std"] = "ci") -> "Claimed":
        """Read a number as printed, for example "2.7 ± 0.1", "2.1 ± <0.1", "0.63" or "up to 11.4".

        Args:
            text: the number.
            spread: what the "±" stands for, a confidence interval or a standard deviation.

        Raises:
            ValueError: the text is something else.
        """
        match = _PRINTED.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"This is not a number as papers print them: {text!r}; one looks like '2.7 ± 0.1'.")
        width = None if match["spread"] is None else float(match["spread"])
        return cls(
            mean=float(match["mean"]),
            ci=width if spread == "ci" else None,
            ci_below=match["below"] is not None,
            std=width if spread == "std" else None,
            qualifier=match["qualifier"] or "",
            digits=_decimal_places(match["mean"]),
            spread_digits=_decimal_places(match["spread"] or "0.0"),
        )

    def printed(self) -> str:
        """Return the number as the publication prints it, for example "2.7 ± 0.1"."""
        text = f"{self.qualifier} {self.mean:.{self.digits}f}".lstrip()
        width = self.ci if self.std is None else self.std
        if width is None:
            return text
        return f"{text} ± {'<' if self.ci_below else ''}{width:.{self.spread_digits}f}"


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A claim in words, to be tested, and whether the publication's own numbers bear it out."""

    claim: str
    """What is claimed, so that it can be tested."""
    own_numbers: str
    """What the publication's own numbers say of it."""


@dataclass(frozen=True, kw_only=True)
class Claims(Generic[Key]):
    """The numbers of one table, or of one place in the text, and what is claimed of them."""

    source: str
    """Where they stand, for example "Table 1, Section 3.1"."""
    title: str
    metric: str
    """What the numbers are, with their unit."""
    cells: Mapping[Key, Claimed]
    statements: tuple[Statement, ...] = ()
    notes: tuple[str, ...] = ()
    """Slips and oddities; the numbers are verbatim all the same."""

    def __getitem__(self, key: Key) -> Claimed:
        """Return one number."""
        return self.cells[key]


def table_rows(text: str) -> Iterator[list[str]]:
    r"""Yield the rows of a table written with ``|`` between its columns; a line that starts with # is a heading.

    Example:
        >>> list(table_rows("# rho | error\n0.05 | 2.7 ± 0.1"))
        [['0.05', '2.7 ± 0.1']]
    """
    for line in text.strip().splitlines():
        if not line.startswith("#"):
            yield [column.strip() for column in line.split("|")]


def _decimal_places(number: str) -> int:
    return len(number.partition(".")[2])
