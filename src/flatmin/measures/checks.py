"""Raise, before any work is done, for what would give a meaningless number."""

import itertools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from flatmin.measures.batches import Batch, check_batch, digest, leaves, preserve_rng_state, rows

if TYPE_CHECKING:
    from flatmin.measures.objective import Objective, Value

NUM_COMPARED_BATCHES = 8  # a shuffled loader that repeats its first eight batches has nothing to shuffle
EVAL_FIX = "Call model.eval() first, or pass allow_nondeterministic=True to measure it with fixed noise."


def check_count(name: str, count: int) -> None:
    """Raise unless an argument is a positive integer."""
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"{name} must be an integer, got {count!r} of type {type(count).__name__}.")
    if count < 1:
        raise ValueError(f"{name} must be at least 1, got {count}.")


def check_operator(op: object) -> None:
    """Raise unless it has what a symmetric operator needs: ``dim``, ``dtype``, ``device`` and ``@``."""
    if not all(hasattr(op, name) for name in ("dim", "dtype", "device", "__matmul__")) or isinstance(op, Tensor):
        raise TypeError(
            f"op must be a HessianOperator, got {type(op).__name__}. Pass HessianOperator(model, loss_fn, data)."
        )


def check_metric(metric: str) -> None:
    """Raise unless it is one of the two that a measure can report."""
    if metric not in ("loss", "error"):
        raise ValueError(f'metric must be "loss" or "error", got {metric!r}.')


def check_finite(value: "Value", where: str) -> None:
    """Raise if a loss cannot be compared with others."""
    if not math.isfinite(value.loss):
        raise ValueError(f"The loss is {value.loss} {where}: there is nothing to measure.")


def check_same_on_every_pass(data: Iterable[Batch]) -> None:
    """Raise if the data is shuffled or augmented again in every pass: no shuffled pass begins with the same batches."""
    # Sequential, not interleaved: two live iterators of one loader may share workers.
    seen, again = ([leaves(b) for b in itertools.islice(iter(data), NUM_COMPARED_BATCHES)] for _ in range(2))
    if len(seen) != len(again) or not all(map(_same, seen, again)):
        raise ValueError(
            "data differs from pass to pass (shuffling or augmentation), so it has no fixed loss. "
            "Use a DataLoader with shuffle=False and without random transforms, or pass list(data); or "
            "allow_nondeterministic=True."
        )


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return (all(s is t for s, t in zip(a, b, strict=False)) and len(a) == len(b)) or digest(a) == digest(b)


def check_model(objective: "Objective", batch: Batch, *, allow_nondeterministic: bool) -> None:
    """Raise unless the loss on a few examples is a mean, and the same when it is computed again."""
    if not allow_nondeterministic:
        _check_batch_norm(objective)
    _choose_layout(objective, batch)
    state = objective.state(objective.weights())
    before = {name: tensor.clone() for name, tensor in state.items()}
    random_state = _random_state(objective.device)
    with torch.no_grad():
        loss = objective.run(state, batch)[0]
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn must return the mean over the batch, a scalar tensor, got {got}.")
        if allow_nondeterministic:
            return
        again = objective.run(state, batch)[0]
        drew = not torch.equal(random_state, _random_state(objective.device))
        tolerance = torch.finfo(objective.dtype).eps ** 0.75 * abs(float(loss))
        if drew or abs(float(again) - float(loss)) > tolerance:
            raise ValueError(f"The model is nondeterministic (dropout, or its own noise). {EVAL_FIX}")
        if not objective.batch_statistics:
            changed = [name for name, tensor in before.items() if not _equal(tensor, state[name])]
            if changed:
                raise ValueError(f"The model changes its buffer {changed[0]!r} as it runs. {EVAL_FIX}")
            _check_mean(objective, batch, float(loss))


def _choose_layout(objective: "Objective", batch: Batch) -> None:
    """Give up the faster layout of images where the model cannot take it (it calls view) or minds it."""
    if not objective.channels_last:
        return
    losses = []
    for objective.channels_last in (False, True):
        try:
            with preserve_rng_state(), torch.no_grad():
                losses.append(float(objective.run(objective.state(objective.weights()), batch)[0]))
        except (RuntimeError, TypeError, ValueError):
            objective.channels_last = False
            return
    objective.channels_last = math.isclose(*losses, rel_tol=1e-4, abs_tol=1e-6)


def _check_batch_norm(objective: "Objective") -> None:
    for name, module in objective.model.named_modules():
        by_batch = isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
        if by_batch and not objective.batch_statistics:
            raise ValueError(
                f"The batch norm layer {name!r} normalizes with the statistics of each batch, so the loss depends "
                f"on how the data is batched. {EVAL_FIX}"
            )


def _check_mean(objective: "Objective", batch: Batch, whole: float) -> None:
    """Raise if the loss of a batch is the sum of its halves' losses."""
    num = check_batch(batch)
    half = num // 2
    if half == 0:
        return

    def loss(start: int, stop: int) -> float:
        with preserve_rng_state():
            return float(objective.run(objective.state(objective.weights()), rows(batch, start, stop))[0])

    first, second = loss(0, half), loss(half, num)
    mean = (half * first + (num - half) * second) / num
    scale = max(abs(whole), abs(first), abs(second))
    if abs(whole - (first + second)) < 1e-3 * scale and abs(whole - mean) > 0.1 * scale:
        raise ValueError("loss_fn must return the mean over the batch, but it returns a sum: use reduction='mean'.")


def _random_state(device: torch.device) -> Tensor:
    state = torch.get_rng_state()
    return torch.cat([state, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else state


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num()) if a.is_floating_point() else torch.equal(a, b)
