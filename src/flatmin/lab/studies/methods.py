"""Methods: ways to train, each with the candidates that its setting is chosen from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flatmin.lab.spec.experiment import Experiment

BASELINE_EPOCHS_FACTOR = 2
"""Runs without SAM may take twice as many epochs; the better of the two is reported (Section 3.1)."""
VALIDATION = 0.1
"""Of the training set, held out to choose rho."""
FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0)
"""The grid of rho, in units of what `flatmin.suggest_rho` says for the run."""
Candidates = Callable[[Experiment], Sequence[Experiment]]


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to train."""

    name: str
    candidates: Candidates
    """What to choose from, given the choice of the method ``after`` (or the condition's start)."""
    after: str | None = None
    """Which method's choice the candidates are variants of; None: of the condition's start."""
    against: tuple[tuple[str, ...], ...] = ()
    """The methods that it is compared with; of several in one tuple, the one with the better mean counts."""
    extends: bool = False
    """Whether its grid grows, by a factor of 2, where the best candidate is at its edge (`beyond`)."""
    ours: bool = False
    """Whether it is not in the publication: its comparisons are corrected apart."""
    stops_early: bool = False
    """Whether the epoch with the lowest validation error counts, instead of the last one."""


def double_epochs(method: Method) -> Method:
    """Return a method that trains for twice as many epochs, with the same settings."""

    def doubled(base: Experiment) -> list[Experiment]:
        factor = BASELINE_EPOCHS_FACTOR
        return [replace(base, epochs=factor * base.epochs, evaluate_every=factor * base.evaluate_every)]

    return Method(name=f"{method.name}, twice the epochs", candidates=doubled, after=method.name)


def stopped_early(base: Method, every: int, *, noisy: bool = False) -> Method:
    """Return a baseline of ours that stops where the error on a clean, or noisy, validation set is lowest."""

    def candidates(start: Experiment) -> list[Experiment]:
        data = replace(start.data, validation=VALIDATION, noisy_validation=noisy)
        return [replace(start, data=data, evaluate_every=every)]

    name = f"{base.name}, stopped early ({'noisy' if noisy else 'clean'} validation)"
    return Method(name=name, candidates=candidates, after=base.name, ours=True, stops_early=True)


def with_rho(rhos: Sequence[float | str], m: int | None = None, part: float = 1.0) -> Candidates:
    """Return a method's candidates: SAM with each rho, in the setting of the baseline."""
    return lambda base: [replace(base, optim=replace(base.optim, rho=rho, m=m, part=part)) for rho in rhos]


def with_factors(factors: Sequence[float] = FACTORS, m: int | None = None, part: float = 1.0) -> Candidates:
    """Return a method's candidates: SAM with each factor of the suggested rho, in the setting of the baseline."""
    return with_rho([f"{factor:g}x" for factor in factors], m, part)


def with_rates(lrs: Sequence[float], decays: Sequence[float]) -> Candidates:
    """Return the baseline's candidates: each learning rate with each weight decay."""
    return lambda base: [
        replace(base, optim=replace(base.optim, lr=lr, weight_decay=decay)) for lr in lrs for decay in decays
    ]


def no_tuning(base: Experiment) -> list[Experiment]:
    """Return the one candidate of a method that has nothing to choose."""
    return [base]


def with_m(m: int | None) -> Candidates:
    """Return the one candidate of a method that is trained by micro-batches of m; by whole batches if None."""
    return lambda base: [replace(base, optim=replace(base.optim, m=m))]


def baselines(candidates: Candidates, name: str = "SGD", after: str | None = None) -> tuple[Method, Method]:
    """Return a method without SAM, with its choice of settings, and the same for twice as many epochs."""
    base = Method(name=name, candidates=candidates, after=after)
    return base, double_epochs(base)


def sam_and_small_m(rhos: Sequence[float], m: int) -> tuple[Method, ...]:
    """Return SAM with one eps for the batch, with one for every m examples, and SGD normalized by m examples.

    The last is a control: with micro-batches batch norm sees fewer examples at once, which is a regularizer by itself.
    """
    sgd = ("SGD", "SGD, twice the epochs")
    control = f"SGD, m = {m}"
    return (
        Method(name=control, candidates=with_m(m), after="SGD"),
        Method(name="SAM", candidates=with_rho(rhos), after="SGD", against=(sgd,)),
        Method(name=f"SAM, m = {m}", candidates=with_rho(rhos, m), after="SGD", against=(sgd, (control,))),
    )
