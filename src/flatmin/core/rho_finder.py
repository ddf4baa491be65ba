r"""Finds the scale of SAM's radius from a few gradients, as a learning-rate finder does for the learning rate.

To first order the loss rises by :math:`g \cdot \epsilon = \lVert T \odot g \rVert_q`, which is linear in rho. The
rule is that it rises by a tenth: :math:`\rho = 0.1\, L / (g \cdot \epsilon_1)`, with :math:`\epsilon_1` SAM's
perturbation for rho = 1.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatmin.core import ddp
from flatmin.core.batch_split import Batch, call_with, split_batch
from flatmin.core.checks import check_rho, keep_loss
from flatmin.core.gradients import drop_gradients
from flatmin.core.pass_state import ModelState, unchanged
from flatmin.core.rho_suggestion import RhoSuggestion
from flatmin.core.rng import RandomState
from flatmin.core.sam import SAM
from flatmin.core.weight_perturber import AscentNorms, WeightPerturber

LossFn = Callable[..., Tensor]


class NotFiniteError(ValueError):
    """The loss or the gradient of some batch overflows, or is not a number."""


def suggest_rho(
    opt: SAM,
    loss_fn: LossFn,
    batches: Iterable[Batch],
    *,
    m: int | None = None,
    num_batches: int = 8,
    rise: float = 0.1,
) -> RhoSuggestion:
    r"""Return the radius at which the loss rises by a tenth, to first order: rho's scale, at one gradient per batch.

    .. math:: \rho = 0.1\, \overline{L} / \overline{g \cdot \epsilon_1},

    with :math:`\epsilon_1` the perturbation of ``opt`` for rho = 1 and means over batches; for p = 2 that is
    :math:`0.1\, L / \lVert g \rVert`. At the start of training this is close to radii chosen on validation data, if
    the model can fit its data in the time it has; otherwise a smaller radius is better. Try half and twice that too.

    Nothing changes: weights, gradients, buffers (of ``opt.model``), random state, the optimizer and its metrics are
    exactly as before, also after an exception. Set the radius yourself: ``opt.rho = suggest_rho(...).rho``. With
    several workers, call it on all of them: means are over all workers' batches, and all get the same radius.

    Args:
        opt: the optimizer; its p, adaptive, groups, sync_perturbation and a direction that is a function are used. Its
            rho is ignored, but groups with a ``sam_rho`` keep their ratio to it: set all ``radii`` of the result.
        loss_fn: returns the mean loss of the examples it is given, as for ``step_batch``: ``loss_fn(*batch)`` for a
            tuple or list, ``loss_fn(batch)`` for a tensor or dict. A constant factor changes nothing: scale the loss if
            float16 gradients underflow.
        batches: a DataLoader, or a list of batches as for ``step_batch``, in the sizes that you train with.
        m: how many examples share a perturbation, as in ``step_batch``: with ``part``, the size of the part.
        num_batches: how many batches to use, at most.
        rise: the first-order rise as a share of the loss.

    Raises:
        TypeError, ValueError: an argument out of its range; or a loss or gradient that no radius follows from.

    Example:
        For :math:`L = w^2 / 2` at w = 3, the loss is 4.5 and the gradient 3:

        >>> w = torch.nn.Parameter(torch.tensor([3.0]))
        >>> opt = SAM(torch.optim.SGD([w], lr=0.1))
        >>> suggestion = suggest_rho(opt, lambda x: (x * w**2 / 2).mean(), [torch.ones(8)])
        >>> round(suggestion.rho, 4)
        0.15
    """
    if not isinstance(opt, SAM):
        raise TypeError(f"opt must be a flatmin.SAM, got {type(opt).__name__}: its p, adaptive and groups are needed.")
    if not opt.settings.follows_gradient:
        raise ValueError(
            f"suggest_rho follows the gradient, but opt has direction={opt.settings.direction!r}. Measure it with a "
            'SAM(..., direction="gradient") around the same base optimizer.'
        )
    if any(group.get("maximize", False) for group in opt.param_groups):
        raise ValueError("suggest_rho needs a loss that is minimized, but a parameter group has maximize=True.")
    if isinstance(num_batches, bool) or not isinstance(num_batches, int) or num_batches < 1:
        raise ValueError(f"num_batches must be a whole number of at least 1, got {num_batches!r}.")
    if not (isinstance(rise, int | float) and 0 < rise < math.inf):
        raise ValueError(f"rise must be a positive share of the loss, got {rise!r}. The rule's is 0.1.")
    opt._state.check_not_perturbed("suggest_rho()")
    source = _Source(opt, loss_fn, batches, m, num_batches)
    table = source.run(())
    loss, unit, grad_norm = _means(table)
    _check(loss, unit)
    rho = rise * loss / unit
    radii = tuple(rho * radius for radius in source.unit_radii)
    per_batch = tuple((rise * table[:, 1] / table[:, 2]).nan_to_num(math.inf).tolist())  # 0 / 0 suggests nothing

    def measure(rhos: Sequence[float]) -> tuple[float, float, list[float]]:
        loss, unit, _, *losses = _means(source.run(rhos))
        return loss, unit, losses

    return RhoSuggestion(rho, radii, loss, grad_norm, per_batch, rise, measure)


def _means(table: Tensor) -> list[float]:
    """Return the means over examples of rows (number of examples, sums over them)."""
    total = table.sum(dim=0)
    return (total[1:] / total[0]).tolist()


def _check(loss: float, unit: float) -> None:
    for name, value in (("loss", loss), ("gradient's norm", unit)):
        if not math.isfinite(value):
            raise NotFiniteError(
                f"The {name} is {value}, so no radius follows from it. Look for bad inputs or a diverged model; in "
                "float16, multiply the loss by a constant such that its gradients neither overflow nor vanish."
            )
    if loss <= 0:
        raise ValueError(
            f"The loss is {loss:.3g}, but the rule is a share of a positive loss whose smallest value is 0, such as "
            "cross-entropy. Shift the loss, or choose rho by hand: try 0.01 to 0.5 on validation data."
        )
    if unit < 0:
        raise ValueError(
            f"The first-order rise of the loss along opt.direction is negative ({unit:.3g} for rho = 1), so no radius "
            "follows from it: the function points downhill. Choose rho by hand."
        )
    if unit == 0:
        raise ValueError(
            "The gradient is 0 for all parameters with a radius above 0, so no radius follows from it. Take a few "
            "training steps first, and check that loss_fn depends on the parameters of opt."
        )


class _Source:
    """Where a suggestion comes from: the batches, and how to compute losses and gradients on them."""

    def __init__(self, opt: SAM, loss_fn: LossFn, batches: Iterable[Batch], m: int | None, num_batches: int) -> None:
        self.opt, self.loss_fn, self.num_batches = opt, loss_fn, num_batches
        self.unit_radii = _unit_radii(opt)
        self.batches = batches
        with unchanged(opt._passes, batches):
            taken = list(itertools.islice(batches, num_batches))
        if not taken:
            raise ValueError("batches is empty: suggest_rho needs at least one batch.")
        splits = [split_batch(batch, 1.0, None) for batch in taken]
        # A short last batch may be smaller than m; the first one may not.
        sizes = [m if m is None or index == 0 else min(m, split.sizes[0]) for index, split in enumerate(splits)]
        self.splits = [split_batch(batch, 1.0, size) for batch, size in zip(taken, sizes, strict=True)]

    def run(self, rhos: Sequence[float]) -> Tensor:
        """Return a row per batch: its number of examples, and sums over them of the values of `_piece`."""
        table = torch.zeros(self.num_batches, 4 + len(rhos), dtype=torch.float64)
        perturber = WeightPerturber()
        perturber.prepare(self.opt.param_groups, self.unit_radii)
        with unchanged(self.opt._passes, self.batches) as buffers, contextlib.ExitStack() as stack:
            perturber.save()
            stack.callback(perturber.restore)
            for row, split in zip(table, self.splits, strict=False):  # other workers may have more batches
                for piece, size in zip(split.micro_batches, split.sizes, strict=True):
                    values = self._piece(piece, rhos, perturber, buffers)
                    row += size * torch.cat([torch.ones(1), values.cpu()]).double()
        if ddp.is_parallel():
            shared = table.to(values)  # where and in what the workers can sum
            dist.all_reduce(shared)
            table = shared.cpu().double()
        return table[table[:, 0] > 0]

    def _piece(self, piece: Any, rhos: Sequence[float], perturber: WeightPerturber, buffers: ModelState) -> Tensor:
        """Return the loss at w, the rise for rho = 1, the gradient norm, and the loss at w + eps for each rho."""
        settings, passes = self.opt.settings, self.opt._passes
        parameters = list(passes.parameters())
        noise = RandomState({p.device for p in parameters})

        def run(*, backward: bool) -> Tensor:
            noise.restore()  # the same noise in all passes of a piece
            buffers.restore()
            local = contextlib.nullcontext() if settings.sync_perturbation else ddp.local_pass(self.opt.model)
            with torch.set_grad_enabled(backward), local:
                loss = call_with(self.loss_fn, piece)
                if backward:
                    loss.backward()  # type: ignore[no-untyped-call]
            return keep_loss(loss)

        def restore() -> None:
            perturber.restore()
            ddp.forget_gathered_weights(self.opt.model, parameters)

        def ascend(rho: float, vectors: Mapping[Tensor, Tensor | None]) -> AscentNorms:
            norms = perturber.ascend(
                [rho * radius for radius in self.unit_radii],
                p=settings.p,
                eta=settings.eta,
                maximize=[False] * len(self.unit_radii),
                vector_of=vectors.get,
            )
            ddp.forget_gathered_weights(self.opt.model, parameters)
            return norms

        loss = run(backward=True)
        grads = {p: p.grad for p in parameters}
        drop_gradients(parameters)
        norms = ascend(1.0, grads)
        unit = max(self.unit_radii) * norms.scaled_gradient
        vectors: Mapping[Tensor, Tensor | None] = grads
        if passes.direction is not None:
            vectors = passes.direction(passes.perturbed_parameters(list(self.unit_radii)), grads)
            restore()
            ascend(1.0, vectors)
            unit = perturber.first_order_rise(grads.get)
        values = [loss, unit, norms.gradient]
        for rho in rhos:
            restore()
            if rho > 0:
                ascend(rho, vectors)
            values.append(run(backward=False))
        restore()
        return torch.stack([value.to(norms.gradient) for value in values])


def _unit_radii(opt: SAM) -> tuple[float, ...]:
    """Return the radius of each group for rho = 1."""
    own = [check_rho(group["sam_rho"], "sam_rho") if "sam_rho" in group else None for group in opt.param_groups]
    if any(own) and opt.rho == 0:
        raise ValueError(
            "opt.rho is 0 while a parameter group has its own sam_rho, so their ratio is unknown. Set opt.rho to a "
            "positive radius first."
        )
    radii = tuple(1.0 if radius is None else radius / (opt.rho or 1.0) for radius in own)
    if max(radii) == 0:
        raise ValueError("Every parameter group has sam_rho=0, so there is nothing to perturb.")
    return radii
