"""Finds out whether a pass can be repeated, which SAM needs, and if not, why."""

import functools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatmin.core.batch_split import Batch
from flatmin.core.dtensor import local_part
from flatmin.core.function_state import Saved, is_numpy_generator, slots_of
from flatmin.core.gradients import drop_gradients
from flatmin.core.pass_state import unchanged
from flatmin.core.sam import SAM

UNKNOWN_SOURCE = (
    "a source that is not among the variables of the pass: a new or unseeded generator (`default_rng()`), the clock, a "
    "data loader, or kernels that are not deterministic"
)


@dataclass(frozen=True)
class PassCheck:
    """What :func:`flatmin.check_pass` found. True if the pass is repeatable; ``print`` it for the whole answer."""

    differences: tuple[str, ...]
    """What differs between two runs from the same start: the loss, the gradients."""
    causes: tuple[str, ...]
    """Why: names of buffers, parameters, generators and other state that SAM does not restore."""
    side_effects: tuple[str, ...]
    """State that every run changes and SAM does not restore, though loss and gradients do not depend on it: metrics and
    lists that get two entries per step. Write to them only where ``opt.is_perturbed`` is False."""

    def __bool__(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        lines = ["The pass is repeatable."] if self else ["The pass is not repeatable. Run twice from the same start:"]
        lines += [f"  {line}" for line in self.differences]
        if self.causes:
            lines += ["It depends on state that it changes:", *(f"  {line}" for line in self.causes)]
        if self.side_effects:
            lines += ["Every pass, so twice per step, it also changes:", *(f"  {line}" for line in self.side_effects)]
        return "\n".join(lines)


def check_pass(opt: SAM, closure: Callable[..., Any], batch: Batch | None = None) -> PassCheck:
    """Run a pass twice at w, as SAM does, and say what is not the same and why.

    SAM's passes must differ in the weights alone. It repeats the noise of torch, NumPy and Python's ``random``, and the
    state of ``opt.model``: buffers, and parameters that are not trained. This finds what else a pass depends on. It
    takes two passes (three if they differ) and waits for the device. Nothing changes, also after an exception; but what
    is drawn from an iterator cannot be put back.

    Args:
        opt: the optimizer.
        closure: what you would pass to ``opt.step``; with ``batch``, the ``loss_fn`` of ``opt.step_batch``. For the
            two-pass form, put the code of one pass into a function that returns the loss.
        batch: a batch for ``loss_fn``.

    Example:
        >>> import numpy as np
        >>> model = torch.nn.Linear(2, 1)
        >>> opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        >>> rng = np.random.default_rng(0)
        >>> def loss_fn(x):
        ...     return (model(x) * rng.random()).square().mean()
        >>> check = check_pass(opt, loss_fn, torch.ones(4, 2))
        >>> bool(check), check.causes
        (False, ('rng: a generator of its own, which SAM does not replay',))
    """
    if not isinstance(opt, SAM):
        raise TypeError(f"opt must be a flatmin.SAM, got {type(opt).__name__}.")
    if not callable(closure):
        raise TypeError(f"closure must be a function, got {type(closure).__name__}.")
    opt._state.check_not_perturbed("check_pass()")
    passes = opt._passes
    run_pass = closure if batch is None else opt._closure(closure, batch)
    trained = list(dict.fromkeys(passes.parameters()))
    named = _named(batch) | ({} if opt.model is None else {"model": opt.model})
    before = [Saved(slot) for slot in slots_of(functools.partial(closure, **named))]
    weights = [p.detach().clone() for p in trained]

    def run() -> tuple[Tensor, list[Tensor | None]]:
        drop_gradients(trained)
        loss = passes.run(run_pass, reduce=opt.settings.sync_perturbation)
        return loss, [None if p.grad is None else local_part(p.grad).detach().clone() for p in trained]

    with unchanged(passes) as model_state:
        try:
            start = passes.start()
            first = run()
            start.restore()
            changed = [saved for saved in before if saved.is_changed()]
            differences = _differences(first, run())
            found: list[str] = []
            if differences:
                for saved in before:
                    saved.restore()
                start.restore()
                found = [_describe(saved, opt) for saved in changed if not model_state.holds(saved.value)]
                iterators = [saved.slot.name for saved in before if isinstance(saved.value, Iterator)]
                found += [f"{name}: an iterator; draw the batch before the pass" for name in iterators]
                if not found or (not iterators and _differences(first, run())):
                    found.append(UNKNOWN_SOURCE)
        finally:
            for saved in before:
                saved.restore()
            for p, weight in zip(trained, weights, strict=True):
                if not torch.equal(p, weight):
                    p.data.copy_(weight)
    effects = [_describe(saved, opt) for saved in changed if not differences and not model_state.holds(saved.value)]
    return PassCheck(tuple(differences), tuple(found), tuple(effects))


def _named(batch: Batch | None) -> dict[str, Any]:
    if batch is None or isinstance(batch, Tensor):
        return {} if batch is None else {"batch": batch}
    items = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    return {f"batch[{key!r}]": tensor for key, tensor in items}


def _differences(first: tuple[Tensor, list[Tensor | None]], second: tuple[Tensor, list[Tensor | None]]) -> list[str]:
    """Return in what two runs differ, beyond rounding."""
    (loss, grads), (other_loss, other_grads) = first, second
    tolerance = torch.finfo(loss.dtype).eps ** 0.5 if loss.is_floating_point() else 1e-6
    found = []
    if not torch.allclose(loss, other_loss, rtol=tolerance, atol=0, equal_nan=True):
        found.append(f"loss {loss.item():.6g} and {other_loss.item():.6g}")
    if [g is None for g in grads] != [g is None for g in other_grads]:
        return [*found, "gradients of different parameters"]
    pairs = [
        (a.double(), b.double()) for a, b in zip(grads, other_grads, strict=True) if a is not None and b is not None
    ]
    size = sum(a.double().square().sum().item() for a, _ in pairs) ** 0.5
    change = sum((a.double() - b).square().sum().item() for a, b in pairs) ** 0.5
    if change > tolerance * size:
        found.append(f"gradients that differ by {change / size if size else math.inf:.2g} of their norm")
    return found


def _describe(saved: Saved, opt: SAM) -> str:
    name, value = saved.slot.name, saved.value
    if isinstance(value, Tensor):
        model = opt.model
        inside = model is not None and any(value is one for one in [*model.parameters(), *model.buffers()])
        if any(value is p for p in opt._passes.parameters() if p.requires_grad):
            return f"{name}: a trained weight, which the pass changes itself"
        if isinstance(value, nn.Parameter):
            fix = "register it as a buffer" if inside else "make it part of opt.model"
            return f"{name}: a parameter that is not trained; {fix}, and SAM restores it"
        return f"{name}: a tensor; register it as a buffer of opt.model, or change a copy"
    if isinstance(value, torch.Generator | random.Random) or is_numpy_generator(value):
        return f"{name}: a generator of its own, which SAM does not replay"
    return f"{name}: {type(value).__name__}"
