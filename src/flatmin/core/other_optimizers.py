"""Other optimizers of the same model: one that steps on the sum of the gradients of both passes is found out."""

import functools
import warnings
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from flatmin.core.step_state import StepState

SUM = "_sam_sum"  # an attribute of gradients: their version when they became the sum of both passes
SUM_WARNING = (
    "{name} steps on the sum of the gradients of SAM's two passes. Zero its gradients in both passes (in the closure, "
    "or inside `with opt.perturbed():`), or put both optimizers under one SAM: SAM([one, other])."
)

_summed: dict[int, tuple["weakref.ref[Tensor]", "weakref.ref[StepState]"]] = {}  # parameters with such gradients


@functools.cache
def _look_at_steps() -> None:
    register_optimizer_step_pre_hook(_warn_if_summed)


def note_summed(parameters: Iterable[Tensor], state: "StepState") -> None:
    """Remember parameters whose gradients both passes have been added to."""
    for p in parameters:
        _look_at_steps()
        setattr(p.grad, SUM, p.grad._version)  # type: ignore[union-attr]
        _summed[id(p)] = weakref.ref(p), weakref.ref(state)


def _warn_if_summed(optimizer: Optimizer, *_: Any) -> None:
    """Warn if an optimizer is about to use such a gradient: not one that was zeroed, and has a pass of its own."""
    if torch.compiler.is_compiling() or not _summed:
        return
    own = (_summed.pop(id(p), None) for group in optimizer.param_groups for p in group["params"])
    for found in [one for one in own if one is not None]:
        p, state = found[0](), found[1]()
        grad = None if p is None else p.grad
        # Clipping is one write; zeroing in place and another pass are two.
        is_sum = grad is not None and grad._version <= getattr(grad, SUM, -2) + 1
        if is_sum and state is not None and state.warn_once("sum of passes"):
            warnings.warn(SUM_WARNING.format(name=type(optimizer).__name__), UserWarning, stacklevel=4)
