"""From numbers of replicas to evidence: they are paired by seed, and what that says of a claim."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from flatmin.lab.studies.findings import Comparison, Verdict, VerdictStatus
from flatmin.lab.studies.statistics import SIGNIFICANT, holm, mean_and_interval, p_text, paired_p_value

BySeed = Mapping[int, float]
AnyContrast = TypeVar("AnyContrast", bound="Contrast")


def mean(values: Iterable[float]) -> float:
    """Return the mean; NaN of nothing."""
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else math.nan


def changes(before: BySeed, after: BySeed) -> dict[int, float]:
    """Return by how much a number changes, for each seed that has both.

    Two of them make the two sides of a difference of differences.

    Example:
        >>> changes({0: 20.0, 1: 22.0, 2: 21.0}, {0: 18.5, 1: 21.0})
        {0: -1.5, 1: -1.0}
    """
    return {seed: after[seed] - before[seed] for seed in sorted(before.keys() & after.keys())}


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A claim that one number is lower than another, with both for each seed."""

    quantity: str
    """What the numbers are, for example "test error, %"."""
    lower_name: str
    higher_name: str
    lower: BySeed
    """What is claimed to be lower."""
    higher: BySeed
    num_asked: int
    """How many pairs were asked for. With fewer nothing is judged: those may be the ones that went well."""
    runs: tuple[str, ...] = ()
    unit: str = "%"
    untestable: str = ""
    """Why all runs that are asked for cannot test the claim at this scale; nothing if they can."""
    gate: str = ""
    """Why the runs, though all are there, are no test of the claim: numbers are shown, and count as not rejected."""
    relative: bool = True
    """Whether the difference is also worth a share of the higher number: not where that may be 0."""

    def gated(self: AnyContrast, notes: Iterable[str | None]) -> AnyContrast:
        """Return the contrast, which is not judged if there is a note on why its runs are not a test."""
        return replace(self, gate="; ".join(note for note in notes if note is not None))

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """Both numbers, for each seed that both have."""
        return [(self.lower[seed], self.higher[seed]) for seed in sorted(self.lower.keys() & self.higher.keys())]

    @property
    def differences(self) -> list[float]:
        """Of each pair; negative where the claim holds."""
        return [low - high for low, high in self.pairs]

    @property
    def waits(self) -> bool:
        """Whether there are fewer pairs than were asked for, or than two, and more may come."""
        return not self.untestable and len(self.differences) < max(2, self.num_asked)

    @property
    def p_value(self) -> float:
        """Student's paired test, two-sided; NaN with fewer than two pairs, fewer than were asked for, or no test."""
        return math.nan if self.waits or self.untestable else paired_p_value(*zip(*self.pairs, strict=True))

    def comparison(self, p_holm: float) -> Comparison:
        """Return it as an entry of a table; there has to be a pair."""
        return Comparison(
            name=f"{self.lower_name} - {self.higher_name}",
            difference=mean_and_interval(self.differences),
            # Of a difference from nothing the share is always 100 %, and tells nothing.
            baseline=mean(high for _, high in self.pairs)
            if self.relative and any(low for low, _ in self.pairs)
            else math.nan,
            quantity=self.quantity,
            p_value=self.p_value,
            p_holm=p_holm,
            num_pairs=len(self.differences),
            unit=self.unit,
            values=tuple(self.differences),
            runs=self.runs,
        )

    def describe(self, p_holm: float) -> str:
        """Return the numbers, how many pairs, and the p-value, in a sentence."""
        n = len(self.differences)
        if self.untestable:
            return f"{self.quantity}: not a test at this scale: {self.untestable}"
        if n == 0:
            return f"{self.quantity}: no pair of runs of {self.lower_name} and {self.higher_name} is available"
        low, high = map(mean, zip(*self.pairs, strict=True))
        said = f"{self.quantity}: {low:.4g} ({self.lower_name}) vs. {high:.4g} ({self.higher_name})"
        if n < self.num_asked:
            return f"{said}; {n} of {self.num_asked} pairs are available, nothing is judged before all are"
        if n == 1:
            return f"{said}; n = 1, too few for a test"
        return f"{said}; difference {mean_and_interval(self.differences)}, n = {n}, {p_text(p_holm)}"


@dataclass(frozen=True, kw_only=True)
class OneSided(Contrast):
    """A claim that one number is lower than another, with a one-sided test."""

    @property
    def p_value(self) -> float:
        """The one-sided p-value of Student's paired test."""
        two_sided = super().p_value
        return two_sided / 2 if mean(self.differences) < 0 else 1 - two_sided / 2

    def kept(self, verdict: Verdict) -> Verdict:
        """Return the verdict on this claim, a limit on an error, as one on a gain: kept; not kept; or still open."""
        if self.gate:
            return verdict
        if verdict.status == "reproduced":
            return replace(verdict, status="kept")
        excess = mean_and_interval(self.differences)
        return replace(verdict, status="not kept") if excess.mean - excess.half_width > 0 else verdict


def gate_text(why: str) -> str:
    """Return what the evidence of a verdict begins with if its gate says that the runs are no test."""
    return f"Not a test of the claim at this scale: {why}. " if why else ""


def refuted(verdict: Verdict, said: str) -> Verdict:
    """Return that a claim does not hold, for a reason that its comparisons do not show; unless it was not tested."""
    if verdict.status == "not tested":
        return verdict
    return replace(verdict, status="not reproduced", evidence=f"{verdict.evidence} {said}")


class Family:
    """All comparisons that an item plans at a scale, corrected together by Holm's method.

    One that waits for runs counts as not rejected, so no verdict changes when it arrives: what is significant now
    stays so, and what may become so, when smaller p-values arrive, is not judged before. So does one whose gate says
    that it is no test: it makes no other claim easier to show.
    """

    def __init__(self, contrasts: Iterable[Contrast]) -> None:
        self.contrasts = list(contrasts)
        p_values = [math.nan if contrast.gate else contrast.p_value for contrast in self.contrasts]
        self._p_holm = holm(p_values)
        self._p_at_best = holm([0.0 if c.waits else p for c, p in zip(self.contrasts, p_values, strict=True)])

    @property
    def names(self) -> list[str]:
        """What is compared, in words: the registered plan has them before there is a run."""
        return [f"{c.quantity}: {c.lower_name} vs. {c.higher_name}" for c in self.contrasts]

    def p_holm(self, contrast: Contrast) -> float:
        """Return the corrected p-value of a member; NaN where there is no test."""
        return self._p_holm[self.contrasts.index(contrast)]

    def is_open(self, contrast: Contrast) -> bool:
        """Return whether the verdict on an available comparison depends on others that wait for runs."""
        at_best = self._p_at_best[self.contrasts.index(contrast)]
        return not contrast.waits and at_best < SIGNIFICANT <= self.p_holm(contrast)

    def status(self, contrast: Contrast) -> VerdictStatus:
        """Say whether the claim of one comparison holds, as far as the runs can show."""
        p = self.p_holm(contrast)
        if contrast.untestable or contrast.gate:
            return "not tested at this scale"
        if math.isnan(p) or self.is_open(contrast):
            return "not tested"
        if p >= SIGNIFICANT:
            return "inconclusive"
        return "reproduced" if mean(contrast.differences) < 0 else "not reproduced"

    def comparison(self, contrast: Contrast) -> Comparison | str:
        """Return a member as an entry of a table; nothing while a pair is missing."""
        missing = len(contrast.differences) < max(1, contrast.num_asked)
        return "" if missing else contrast.comparison(self.p_holm(contrast))

    def correction(self, contrasts: Sequence[Contrast]) -> str:
        """Return how many comparisons the p-values are corrected for, and whether others are waited for."""
        if len(self.contrasts) == 1 or all(math.isnan(self.p_holm(c)) for c in contrasts):
            return ""
        said = f"Holm's correction for {len(self.contrasts)} comparisons"
        waiting = sum(c.waits for c in self.contrasts)
        is_open = any(map(self.is_open, contrasts))
        return f"{said}, open until the {waiting} missing ones are available" if is_open else said

    def judge(self, claim: str, contrasts: Sequence[Contrast]) -> Verdict:
        """Return whether a claim holds that consists of one or several members, all of which must.

        It did not hold where one of them is significantly the other way round; else it is not tested while a pair of
        any of them is missing, or where one of them cannot test it.
        """
        parts = [self.status(contrast) for contrast in contrasts]
        status: VerdictStatus = "inconclusive"
        if "not reproduced" in parts:
            status = "not reproduced"
        elif "not tested" in parts or not parts:
            status = "not tested"
        elif "not tested at this scale" in parts:
            status = "not tested at this scale"
        elif all(part == "reproduced" for part in parts):
            status = "reproduced"
        said = [contrast.describe(self.p_holm(contrast)) for contrast in contrasts]
        gate = "; ".join(dict.fromkeys(note for c in contrasts if c.gate for note in c.gate.split("; ")))
        said += [self.correction(contrasts)] if self.correction(contrasts) else []
        return Verdict(
            claim=claim,
            status=status,
            evidence=f"{gate_text(gate)}{'; '.join(said)}.",
            comparisons=[c.comparison(self.p_holm(c)) for c in contrasts if c.differences],
        )
