"""SAM for trainers: its gradient is one call, the base optimizer's step is another."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatmin.core.checks import Closure, shares_of
from flatmin.core.optimizer_wrapper import with_own_hooks
from flatmin.core.pass_check import check_pass
from flatmin.core.rho_finder import NotFiniteError, suggest_rho
from flatmin.core.sam import SAM

Kind = TypeVar("Kind", bound=SAM)


class DeferredSAM(SAM):
    """Leaves the gradient of a SAM step in the parameters, and steps with it later.

    Trainers unscale and clip gradients between the backward pass and the step. They do so once per step here, on the
    gradient that the base optimizer uses, whatever passes it was made from.

    Example:
        >>> w = nn.Parameter(torch.tensor([1.0]))
        >>> opt = DeferredSAM(torch.optim.SGD([w], lr=0.1), rho=0.5)
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = (w**2).sum() / 2
        ...     loss.backward()
        ...     return loss
        >>> opt.compute_gradient(closure)
        tensor(0.5000)
        >>> w.grad
        tensor([1.5000])
        >>> opt.step()
        >>> w.data
        tensor([0.8500])
    """

    def compute_gradient(
        self, closure: Closure, *, rest: Closure | None = None, weights: Sequence[float] | None = None
    ) -> Tensor | None:
        """Run all passes of a step, and return its loss; the arguments are as in :meth:`flatmin.SAM.step`."""
        self._state.marks.revoke_step()
        if rest is None:
            loss = self._closure_gradient(closure)
        else:
            loss = self._micro_batch_gradient([closure], rest, shares_of([closure], rest, weights))
        self._state.marks.allow_step(self._passes.parameters())
        return loss

    @with_own_hooks
    def step(self, closure: Closure | None = None) -> Any:  # type: ignore[override]
        """Take the base optimizer's step; a closure is called once before it, and has to compute the gradient.

        One that returns None skips the step, as in Lightning.
        """
        loss = None if closure is None else closure()
        if closure is None or loss is not None:
            self._step_ready()
        return loss


class RhoSearch:
    """Sets the radius of ``rho="auto"`` on the first batches: the loss rises by a tenth, to first order.

    Each of the first ``NUM_BATCHES`` steps measures its own batch, at one more gradient, and takes the radius that all
    batches so far suggest; then it is fixed. It needs no data of its own, and the radius is part of checkpoints. An
    optimizer with a radius was trained before: nothing is measured.
    """

    NUM_BATCHES = 8

    def __init__(self, sam: SAM) -> None:
        self._sam, self._values = sam, torch.zeros(2, dtype=torch.float64)  # sums of losses, and of rises for rho = 1
        self._num_left = self.NUM_BATCHES if sam.rho == 0 else 0

    def measure(self, run: Callable[[], Tensor], scaler: Any | None = None) -> None:
        """Run a forward and backward pass if needed; ``run`` returns the loss, whose gradients the scaler scales."""
        if self._num_left == 0:
            return
        scale = 1.0 if scaler is None else scaler.get_scale()

        def loss_fn(_: Tensor) -> Tensor:
            return (run().detach() * scale).requires_grad_()  # its backward() does nothing: run() has called it

        try:
            suggestion = suggest_rho(self._sam, loss_fn, [torch.zeros(1)], num_batches=1)
        except NotFiniteError:  # on all workers, whichever of them overflows
            if scaler is None:
                raise
            return  # the scaler will skip this step and lower its scale
        self._values += torch.tensor([suggestion.loss, suggestion.rise * suggestion.loss / suggestion.rho]) / scale
        loss, unit = self._values.tolist()
        self._sam.rho = suggestion.rise * loss / unit
        self._num_left -= 1


class TrainerSettings:
    """The settings of SAM that a trainer was given, checked before there is a model, and what they ask of first steps.

    Args:
        settings: SAM's, where ``rho`` may be "auto", and ``part``, the share of the batch that SAM is applied to.
        check: whether to check at the first step that the pass can be repeated.
    """

    def __init__(self, settings: Mapping[str, Any], *, check: bool) -> None:
        self.sam = dict(settings)
        self.part = part = self.sam.pop("part", 1.0)
        self.is_auto = self.sam.get("rho") == "auto"
        if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part <= 1:
            raise ValueError(
                f"part must be a number in (0, 1], got {part!r}: the share of the batch that SAM is applied to."
            )
        if "model" in self.sam or "base" in self.sam:
            raise TypeError("The trainer passes SAM its model and base optimizer. Leave `model` and `base` out.")
        if self.is_auto:
            self.sam["rho"] = 0.0
            if self.sam.get("direction", "gradient") in ("random", "momentum"):
                raise ValueError(
                    f'rho="auto" follows the gradient, not direction={self.sam["direction"]!r}: give a number.'
                )
        SAM(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), **self.sam)
        self.check = check
        self._checked: SAM | None = None
        self.begin()

    def begin(self) -> None:
        """Begin a training: a search for the radius that did not end before is not continued."""
        self._search: RhoSearch | None = None

    def wrap(self, base: Optimizer, kind: type[Kind], model: nn.Module | None = None) -> Kind:
        """Return a SAM around an optimizer, or raise if it is one already."""
        if isinstance(base, SAM):
            raise TypeError(
                "The optimizer is a SAM already, and would be wrapped in another one. Return its base optimizer "
                "instead."
            )
        return kind(base, model=model, **self.sam)

    def before_gradient(self, sam: SAM, run: Closure, scaler: Any | None) -> None:
        """Check at the first step that a pass can be repeated, and set the radius of ``rho="auto"`` at the first ones.

        What the pass changes besides is not reported: models fill caches at first.
        """
        if self.check and self._checked is not sam:
            check = check_pass(sam, run)
            if not check:
                raise ValueError(f"check=True: {check}")
            self._checked = sam
        if self.is_auto:
            self._search = self._search or RhoSearch(sam)
            self._search.measure(run, scaler)

    def warn_if_rho_differs(self, sam: SAM, rho: float) -> None:
        """Warn if a checkpoint has replaced the radius that was asked for."""
        if not self.is_auto and sam.rho != rho:
            warnings.warn(
                f"The checkpoint has rho={sam.rho:g}, which replaces rho={rho:g}, as it replaces the learning rate. To "
                "train with another radius, assign to `rho` of the optimizer when training starts.",
                UserWarning,
                stacklevel=3,
            )
