"""What a search for SAM's radius found: the suggestion, and the measured rise of the loss over rho."""

import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flatmin.core.checks import check_rho

Measure = Callable[[Sequence[float]], tuple[float, float, list[float]]]
"""Takes radii; returns the mean loss at w, its first-order rise for rho = 1, and the mean loss at each radius."""

MAX_CURVATURE = 2.0  # between the measured and the first-order rise
MAX_SPREAD = 3.0  # between batches
MEASURE_AGAIN = (
    "an unstable start or large initial logits can cause this. Train for a few hundred steps with the suggestion, "
    "measure again, and take the smaller radius."
)


@dataclass(frozen=True)
class RiseCurve:
    """The measured rise of the loss over rho: what ``RhoSuggestion.measure()`` returns."""

    rho: float
    """The suggestion."""
    loss: float
    """The mean loss at w."""
    rhos: tuple[float, ...]
    """In increasing order; the suggestion is one of them."""
    rises: tuple[float, ...]
    """The mean rise of the loss from w to w + eps at each rho."""
    first_order: tuple[float, ...]
    r"""The mean of :math:`g \cdot \epsilon` at each rho: a straight line."""

    @property
    def message(self) -> str:
        """A warning; empty if there is none."""
        index = self.rhos.index(self.rho)
        ratio = self.rises[index] / self.first_order[index]
        if 1 / MAX_CURVATURE <= ratio <= MAX_CURVATURE:
            return ""
        return (
            f"At the suggested rho={self.rho:.3g} the loss rises {ratio:.2g} times as much as its gradient predicts: "
            + MEASURE_AGAIN
        )

    def plot(self) -> Any:
        """Return a matplotlib figure, with logarithmic axes."""
        try:
            figure = importlib.import_module("matplotlib.figure").Figure(figsize=(6.0, 3.6), layout="constrained")
        except ImportError as error:
            raise ImportError("Plots need matplotlib: pip install matplotlib.") from error
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        share = [rise / self.loss if rise > 0 else math.nan for rise in self.rises]  # a fall has no logarithm
        axes.loglog(self.rhos, share, "o-", color="#1f5fa8", markersize=4, label="measured")
        line = [value / self.loss for value in self.first_order]
        axes.loglog(self.rhos, line, "--", color="#8a8f98", label="first order")
        axes.axvline(self.rho, color="#d9730d", label=f"suggestion: {self.rho:.3g}")
        axes.set(xlabel=r"$\rho$", ylabel="rise of the loss / loss")
        axes.legend(frameon=False)
        return figure

    def __str__(self) -> str:
        rows = [f"{'rho':>10} {'rise':>10} {'first order':>12} {'rise / loss':>12}"]
        for rho, rise, line in zip(self.rhos, self.rises, self.first_order, strict=True):
            mark = "  <- suggested" if rho == self.rho else ""
            rows.append(f"{rho:>10.3g} {rise:>10.3g} {line:>12.3g} {rise / self.loss:>12.3g}{mark}")
        return "\n".join([*rows, *filter(None, [self.message])])


@dataclass(frozen=True)
class RhoSuggestion:
    """A radius for SAM, and what it was computed from: what :func:`flatmin.suggest_rho` returns."""

    rho: float
    """The suggested radius, for ``opt.rho``; if groups have a ``sam_rho``, set ``radii``."""
    radii: tuple[float, ...]
    """The radius of each parameter group: rho, or what keeps the ratio of the group's ``sam_rho`` to ``opt.rho``."""
    loss: float
    """The mean loss."""
    grad_norm: float
    r"""The mean of the dual norm :math:`\lVert g \rVert_q`, each over the examples that share a perturbation."""
    per_batch: tuple[float, ...]
    """What each batch alone suggests."""
    rise: float
    """The first-order rise of the loss at ``rho``, as a share of the loss."""
    _measure: Measure = field(repr=False, compare=False)

    @property
    def spread(self) -> float:
        """The largest value of a batch over the smallest one."""
        low, high = min(self.per_batch), max(self.per_batch)
        return high / low if low > 0 else math.inf

    @property
    def message(self) -> str:
        """A warning; empty if there is none."""
        lines = []
        if any(radius not in (0, self.rho) for radius in self.radii):
            lines.append(
                "Groups have radii of their own. Set them with it: for group, radius in zip(opt.param_groups, "
                'suggestion.radii): group["sam_rho"] = radius.'
            )
        if self.spread > MAX_SPREAD:
            said = f"The batches alone suggest radii that differ by a factor of {self.spread:.2g}: "
            lines.append(said + MEASURE_AGAIN)
        return "\n".join(lines)

    def measure(self, rhos: Iterable[float] | None = None) -> RiseCurve:
        """Measure the rise of the loss at several radii, on the same batches and at the weights as they are now.

        Args:
            rhos: the radii; 1/16 to 16 times the suggestion if None. The suggestion is added. Groups with a ``sam_rho``
                keep its ratio to rho. Each costs a forward pass per batch, and the direction one gradient.
        """
        given = [self.rho * 2.0**k for k in range(-4, 5)] if rhos is None else [check_rho(rho) for rho in rhos]
        radii = tuple(sorted({*given, self.rho}))
        loss, unit, losses = self._measure(radii)
        rises = tuple(value - loss for value in losses)
        return RiseCurve(self.rho, loss, radii, rises, tuple(unit * rho for rho in radii))

    def plot(self, rhos: Iterable[float] | None = None) -> Any:
        """Return a matplotlib figure of ``measure(rhos)``: the measured rise, the first-order line, the suggestion."""
        return self.measure(rhos).plot()

    def __str__(self) -> str:
        text = f"rho = {self.rho:.3g} (loss {self.loss:.3g}, gradient norm {self.grad_norm:.3g}, "
        text += f"{len(self.per_batch)} batches, per batch {min(self.per_batch):.3g} to {max(self.per_batch):.3g})"
        return "\n".join([text, *filter(None, [self.message])])
