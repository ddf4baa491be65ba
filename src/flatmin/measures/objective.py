r"""A loss on fixed data, :math:`L_S(w) = \frac{1}{n} \sum_i \ell(w, x_i, y_i)`, that leaves the model untouched.

The model runs through ``torch.func.functional_call`` with weights and buffers handed in from outside, so that
its own are never written. Means over batches are weighted by the number of examples, so that ragged batches
are exact.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from flatmin.measures.batches import (
    Batch,
    check_batch,
    check_data,
    pieces,
    rng_kept,
    rows,
    same_on_every_pass,
    tree_map,
)
from flatmin.measures.parameters import Params, parameter_names, unwrapped, working_dtype

LossFn = Callable[[Any, Any], Tensor]

NUM_PROBED_EXAMPLES = 8  # enough to see a model draw random numbers; small against any real pass
EVAL_REMEDY = "Call model.eval() first, or pass allow_nondeterministic=True to measure it with fixed noise."


class NoErrorRateError(ValueError):
    """The outputs are not those of a classifier."""


@dataclass(frozen=True)
class Value:
    """The loss, and the error rate where it was asked for (NaN otherwise), on some examples."""

    loss: float
    error: float
    num_examples: int

    def metric(self, name: str) -> float:
        """Return the loss or the error."""
        return self.error if name == "error" else self.loss


class Objective:
    """The mean loss of a model on fixed data, as a function of some of its weights.

    Weights of bfloat16 and float16 are measured in float32: a perturbation of norm 0.05 is lost in their
    rounding. Every pass starts from the random state of the caller and puts it back, so that noise which was
    allowed is the same in all passes.

    Args:
        model: any module; called as ``model(inputs)``, ``model(*inputs)`` for a tuple, ``model(**inputs)``
            for a dict.
        loss_fn: ``loss_fn(outputs, targets)``, the mean over the examples of a batch.
        data: an iterable of ``(inputs, targets)`` that can be passed over several times, in the same order.
        params: the weights to measure, as parameters of the model or their names; all that require a gradient
            if None.
        group: a process group in which each rank holds a shard of the data; the results are those of the
            whole.
        allow_nondeterministic: do not refuse dropout, batch norm in train mode, shuffled or augmented data.
        batch_statistics: whether batch norm layers normalise with each batch's own statistics, whatever their
            mode.

    Raises:
        TypeError: if data is a one-shot iterator, or has batches of another form.
        ValueError: if data is empty, or the loss is not a finite mean, or not deterministic.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        data: Iterable[Batch],
        *,
        params: Params | None = None,
        group: dist.ProcessGroup | None = None,
        allow_nondeterministic: bool = False,
        batch_statistics: bool = False,
    ) -> None:
        self.model = unwrapped(model)
        self.loss_fn = loss_fn
        self.names = parameter_names(self.model, params)
        self.group = group
        self.batch_statistics = batch_statistics
        check_data(data)
        self.data = data
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        self._parameters = [parameters[name] for name in self.names]
        self.device = self._parameters[0].device
        self.dtype = working_dtype(self._parameters)
        with rng_kept(self.data):
            self.num_local, self.num_batches = self._agree(lambda: self._inspect(allow_nondeterministic))
        self.num_examples = int(self.reduced(torch.tensor(float(self.num_local), device=self.device)))
        if self.num_examples == 0:
            raise ValueError(
                "data is empty: it yields no example. A generator that was used up yields none either."
            )

    def _inspect(self, allow_nondeterministic: bool) -> tuple[int, int]:
        """Check the data and the model, and count the examples and batches of this rank."""
        sizes, first = [], None
        for batch in self.data:
            sizes.append(check_batch(batch))
            first = batch if first is None and sizes[-1] else first
        if first is None:
            return 0, 0
        if not allow_nondeterministic:
            if not same_on_every_pass(self.data):
                raise ValueError(
                    "data differs from pass to pass (shuffling or augmentation), so that there is no fixed loss to "
                    "measure. Use a DataLoader with shuffle=False and without random transforms, or pass list(data); "
                    "or allow_nondeterministic=True."
                )
            self._check_deterministic(rows(first, 0, NUM_PROBED_EXAMPLES))
        self._check_mean(rows(first, 0, NUM_PROBED_EXAMPLES))
        return sum(sizes), sum(size > 0 for size in sizes)

    def _check_deterministic(self, batch: Batch) -> None:
        for name, module in self.model.named_modules():
            if (
                isinstance(module, _BatchNorm)
                and not self.batch_statistics
                and _uses_batch_statistics(module)
            ):
                raise ValueError(
                    f"The batch norm layer {name!r} normalises with the statistics of each batch, so that the loss "
                    f"depends on how the data is batched. {EVAL_REMEDY}"
                )
        with torch.no_grad():
            state = self.state(self.weights())
            before = {name: tensor.clone() for name, tensor in state.items()}
            random_state = _random_state(self.device)
            losses = [float(self._loss(state, batch)[0]) for _ in range(2)]
        drew = not torch.equal(random_state, _random_state(self.device))
        tolerance = torch.finfo(self.dtype).eps ** 0.75 * abs(losses[0])
        if drew or abs(losses[1] - losses[0]) > tolerance:
            raise ValueError(
                f"The model is random (dropout, or noise of its own): no two losses agree. {EVAL_REMEDY}"
            )
        changed = [name for name, tensor in before.items() if not _equal(tensor, state[name])]
        if changed and not self.batch_statistics:
            raise ValueError(f"The model changes its buffer {changed[0]!r} as it runs. {EVAL_REMEDY}")

    def _check_mean(self, batch: Batch) -> None:
        num = check_batch(batch)
        with torch.no_grad(), rng_kept():
            loss = self._loss(self.state(self.weights()), batch)[0]
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise ValueError(f"loss_fn must return the mean over the batch, a scalar, got {shape}.")
            if num < 2 or self.batch_statistics:
                return
            parts = [
                float(self._loss(self.state(self.weights()), rows(batch, *cut))[0])
                for cut in ((0, num // 2), (num // 2, num))
            ]
        whole = float(loss)
        scale = max(abs(whole), *map(abs, parts))
        mean = (parts[0] * (num // 2) + parts[1] * (num - num // 2)) / num
        if abs(whole - sum(parts)) < 1e-3 * scale and abs(whole - mean) > 0.1 * scale:
            raise ValueError(
                "loss_fn must return the mean over the batch, but it returns a sum: use reduction='mean'."
            )

    def weights(self) -> list[Tensor]:
        """Return the measured weights as they are now, detached, in the dtype of the measurement."""
        return [self._raised(p.detach()) for p in self._parameters]

    def state(self, weights: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return all that ``functional_call`` needs, with these weights and copies of the buffers."""
        state = {name: self._raised(p.detach()) for name, p in self.model.named_parameters()}
        state |= {name: self._raised(b.detach().clone()) for name, b in self.model.named_buffers()}
        return state | dict(zip(self.names, weights, strict=True))

    def _raised(self, tensor: Tensor) -> Tensor:
        low = tensor.is_floating_point() and tensor.element_size() < 4
        return tensor.to(self.dtype) if low else tensor

    def _loss(self, state: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Any, Any]:
        inputs, targets = tree_map(lambda t: self._raised(t.to(self.device, non_blocking=True)), tuple(batch))
        args, kwargs = (), {}
        if isinstance(inputs, dict):
            kwargs = inputs
        else:
            args = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        with _batch_statistics(self.model, self.batch_statistics):
            outputs = functional_call(self.model, state, args, kwargs)
            return self.loss_fn(outputs, targets), outputs, targets

    def loss(self, weights: Sequence[Tensor], batch: Batch) -> Tensor:
        """Return the mean loss on one batch, with its graph."""
        return self._loss(self.state(weights), batch)[0]

    def value(
        self,
        weights: Sequence[Tensor],
        batches: Iterable[Batch] | None = None,
        *,
        error: bool = False,
        size: int | None = None,
    ) -> Value:
        """Return the mean loss (and error rate) at these weights, on all data or on some batches of this rank."""
        with rng_kept(self.data), torch.no_grad():
            totals, state = _Totals(), self.state(weights)
            for batch, num in pieces(self.data if batches is None else batches, size):
                totals.add(*self._loss(state, batch), num, error)
        return self._mean(totals, shared=batches is None)

    def gradient(
        self,
        weights: Sequence[Tensor],
        batches: Iterable[Batch] | None = None,
        *,
        error: bool = False,
        size: int | None = None,
    ) -> tuple[Value, list[Tensor]]:
        """Return the value and the gradient at these weights, on all data or on some batches of this rank."""
        leaves = [w.detach().requires_grad_() for w in weights]
        total = [torch.zeros_like(w) for w in weights]
        with rng_kept(self.data), torch.enable_grad():
            totals, state = _Totals(), self.state(leaves)
            for batch, num in pieces(self.data if batches is None else batches, size):
                loss, outputs, targets = self._loss(state, batch)
                grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
                totals.add(loss, outputs, targets, num, error)
                for t, g in zip(total, grads, strict=True):
                    t.add_(g, alpha=num)
        shared = batches is None
        num = self.num_examples if shared else totals.num
        return self._mean(totals, shared=shared), [
            (self.reduced(t) if shared else t).div_(num) for t in total
        ]

    def _mean(self, totals: "_Totals", *, shared: bool) -> Value:
        if not shared:
            return Value(totals.loss / totals.num, totals.error / totals.num, totals.num)
        if totals.num != self.num_local:
            raise ValueError(
                f"data yielded {totals.num} examples in this pass and {self.num_local} in the first: "
                "it must be the same in every pass. Pass list(data)."
            )
        wide = torch.float32 if self.device.type == "mps" else torch.float64
        sums = self.reduced(torch.tensor([totals.loss, totals.error], dtype=wide, device=self.device))
        loss, error = (sums / self.num_examples).tolist()
        return Value(loss, error, self.num_examples)

    def reduced(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks of the group, in place; the tensor itself if there is no group."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def gathered(self, part: Any) -> list[Any]:
        """Return what every rank of the group passed, in the order of the ranks."""
        if self.group is None:
            return [part]
        parts: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(parts, part, group=self.group)
        return parts

    def _agree(self, check: Callable[[], tuple[int, int]]) -> tuple[int, int]:
        """Run a check on every rank and raise on all of them if one fails: the others would wait for ever."""
        found, failure = (0, 0), None
        try:
            found = check()
        except Exception as error:
            if self.group is None:
                raise
            failure = error
        failures = [
            f"rank {rank}: {text}"
            for rank, text in enumerate(self.gathered(failure and str(failure)))
            if text
        ]
        if failures:
            raise ValueError("; ".join(failures)) from failure
        return found


class _Totals:
    """Sums over the examples seen so far."""

    def __init__(self) -> None:
        self.loss, self.error, self.num = 0.0, 0.0, 0

    def add(self, loss: Tensor, outputs: Any, targets: Any, num: int, error: bool) -> None:
        self.loss += float(loss.detach()) * num
        self.error += error_rate(outputs, targets) * num if error else math.nan
        self.num += num


class _batch_statistics:  # noqa: N801 (a context manager, used like a function)
    """Put batch norm layers into train mode for a while, if asked to."""

    def __init__(self, model: nn.Module, active: bool) -> None:
        self.layers = [m for m in model.modules() if isinstance(m, _BatchNorm)] if active else []

    def __enter__(self) -> None:
        self.modes = [layer.training for layer in self.layers]
        for layer in self.layers:
            layer.training = True

    def __exit__(self, *_: object) -> None:
        for layer, mode in zip(self.layers, self.modes, strict=True):
            layer.training = mode


def error_rate(outputs: Any, targets: Any) -> float:
    """Return the fraction of wrong predictions: the class of the largest output (dimension 1) is not the target's.

    Example:
        >>> error_rate(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
        0.5
    """
    if isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.ndim >= 2:
        labels = (
            targets.argmax(1) if targets.is_floating_point() and targets.shape == outputs.shape else targets
        )
        predicted = outputs.argmax(1)
        if labels.shape == predicted.shape and not labels.is_floating_point():
            return int((predicted != labels).sum()) / labels.numel()
    shapes = [tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in (outputs, targets)]
    raise NoErrorRateError(
        f"The error rate needs outputs (N, classes, ...) and targets (N, ...) with classes, got {shapes[0]} and "
        f"{shapes[1]}. For other outputs use metric='loss'."
    )


def _uses_batch_statistics(layer: _BatchNorm) -> bool:
    return layer.training or layer.running_mean is None


def _random_state(device: torch.device) -> Tensor:
    state = torch.get_rng_state()
    return torch.cat([state, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else state


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num()) if a.is_floating_point() else torch.equal(a, b)
