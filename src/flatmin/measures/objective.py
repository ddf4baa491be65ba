r"""A loss on fixed data, :math:`L_S(w) = \frac{1}{n} \sum_i \ell(w, x_i, y_i)`; the model stays as it is.

The model runs through ``torch.func.functional_call`` with weights and buffers handed in from outside, so
its own are never written. Means over batches are weighted by the number of examples, so ragged batches are
exact.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from flatmin.measures.batches import Batch, check_batch, check_data, measuring, pieces, rows, tree_map
from flatmin.measures.checks import check_model, check_same_on_every_pass
from flatmin.measures.double_backward import TwiceDifferentiable
from flatmin.measures.parameters import Params, flatten, parameter_names, unwrapped

LossFn = Callable[[Any, Any], Tensor]
Result = TypeVar("Result")

NUM_PROBED_EXAMPLES = 2  # enough to see a model draw random numbers; small compared with any real pass


class NoErrorRateError(ValueError):
    """The outputs are not a classifier's."""


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
    rounding. Every pass starts from the random state of the caller and puts it back: noise that was allowed is
    the same in all passes.

    The model is called as ``model(inputs)``, ``model(*inputs)`` for a tuple, ``model(**inputs)`` for a dict. The
    other arguments are the public measures'. ``batch_statistics`` lets batch norm normalize with each batch's own
    statistics, whatever its mode.
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
        self.dtype = torch.float64 if any(p.dtype == torch.float64 for p in self._parameters) else torch.float32
        # On a CPU, convolutions are a third faster on images laid out with the channels last.
        convolves = any(isinstance(m, nn.Conv2d) for m in self.model.modules())
        self.channels_last = convolves and self.device.type == "cpu" and self.dtype == torch.float32
        with measuring(self.data):
            counts = self.together(lambda: self._inspect(allow_nondeterministic))
        self.num_local, self.num_batches = counts[0 if group is None else dist.get_rank(group)]
        self.shards = [num for num, _ in counts]
        self.num_examples = sum(self.shards)
        if self.num_examples == 0:
            raise ValueError("data is empty: it yields no example. A generator that was used up yields none either.")

    def _inspect(self, allow_nondeterministic: bool) -> tuple[int, int]:
        """Check the data and the model, and count the examples and batches of this rank."""
        sizes, first = [], None
        for batch in self.data:
            sizes.append(check_batch(batch))
            first = batch if first is None and sizes[-1] else first
        if first is None:
            return 0, 0
        if not allow_nondeterministic:
            check_same_on_every_pass(self.data)
        check_model(self, rows(first, 0, NUM_PROBED_EXAMPLES), allow_nondeterministic=allow_nondeterministic)
        return sum(sizes), sum(size > 0 for size in sizes)

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

    def run(self, state: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Any, Any]:
        """Return the mean loss on one batch, the outputs, and the targets on the model's device."""
        inputs, targets = tree_map(lambda t: self._raised(t.to(self.device, non_blocking=True)), tuple(batch))
        if self.channels_last:
            inputs = tree_map(_channels_last, inputs)
        args, kwargs = (), {}
        if isinstance(inputs, dict):
            kwargs = inputs
        else:
            args = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        with _batch_statistics(self.model, self.batch_statistics):
            outputs = functional_call(self.model, state, args, kwargs)
            return self.loss_fn(outputs, targets), outputs, targets

    def differentiable(
        self, weights: Sequence[Tensor], batch: Batch, *, linear: bool = False
    ) -> tuple[Tensor, Any, Any]:
        """Run one batch with a graph whose gradients can be differentiated: in what they start from only, if linear."""
        # Without it, second derivatives gain nothing by the layout that makes the first ones fast.
        with TwiceDifferentiable(linear=linear) if self.channels_last else nullcontext():
            return self.run(self.state(weights), batch)

    def value(
        self,
        weights: Sequence[Tensor],
        batches: Iterable[Batch] | None = None,
        *,
        error: bool = False,
        size: int | None = None,
        gradient: Tensor | None = None,
    ) -> Value:
        """Return the mean loss (and error rate) at these weights, on all data or on some batches.

        With ``gradient``, the sum of the examples' gradients in the weights, which are leaves, is added to it.
        """
        losses, errors, num_examples = 0.0, 0.0, 0
        with measuring(self.data), torch.set_grad_enabled(gradient is not None):
            state = self.state(weights)
            for batch, num in pieces(self.data if batches is None else batches, size):
                loss, outputs, targets = self.run(state, batch)
                if gradient is not None:
                    grads = torch.autograd.grad(loss, weights, materialize_grads=True)
                    gradient.add_(flatten(grads, self.dtype), alpha=num)
                losses += float(loss.detach()) * num
                errors += error_rate(outputs, targets) * num if error else math.nan
                num_examples += num
        if batches is not None:
            return Value(losses / num_examples, errors / num_examples, num_examples)
        if num_examples != self.num_local:
            raise ValueError(
                f"data yielded {num_examples} examples in this pass and {self.num_local} in the first: "
                "it must be the same in every pass. Pass list(data)."
            )
        wide = torch.float32 if self.device.type == "mps" else torch.float64
        sums = self.reduced(torch.tensor([losses, errors], dtype=wide, device=self.device))
        loss_mean, error_mean = (sums / self.num_examples).tolist()
        return Value(loss_mean, error_mean, self.num_examples)

    def gradient(
        self,
        weights: Sequence[Tensor],
        batches: Iterable[Batch] | None = None,
        *,
        error: bool = False,
        size: int | None = None,
    ) -> tuple[Value, Tensor]:
        """Return the value and the gradient, flattened, at these weights, on all data or on some batches."""
        leaves = [w.detach().requires_grad_() for w in weights]
        total = torch.zeros(sum(w.numel() for w in weights), dtype=self.dtype, device=self.device)
        value = self.value(leaves, batches, error=error, size=size, gradient=total)
        return value, (self.reduced(total) if batches is None else total).div_(value.num_examples)

    def reduced(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks of the group, in place; the tensor itself if there is no group."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def together(self, work: Callable[[], Result]) -> list[Result]:
        """Do some work on every rank of the group, and return the results of all, in the order of the ranks.

        What fails on one rank is raised on all of them: the others would wait for it for ever.
        """
        if self.group is None:
            return [work()]
        failure: Exception | None = None
        mine: Result | None = None
        try:
            mine = work()
        except Exception as error:
            failure = error
        parts: list[tuple[str | None, Any]] = [(None, None)] * dist.get_world_size(self.group)
        dist.all_gather_object(parts, (failure and str(failure), mine), group=self.group)
        failures = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(parts) if text is not None]
        if failures:
            raise ValueError("; ".join(failures)) from failure
        return [part for _, part in parts]


@contextmanager
def _batch_statistics(model: nn.Module, active: bool) -> Iterator[None]:
    """Put batch norm layers into train mode for a while, if asked to."""
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and not m.training] if active else []
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def error_rate(outputs: Any, targets: Any) -> float:
    """Return the fraction of wrong predictions: the largest output (dimension 1) is not the target's.

    Targets are classes, or probabilities of them (of mixed images, say). With one output, with targets of several
    labels or with labels to ignore there is no error rate.

    Example:
        >>> error_rate(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
        0.5
    """
    if isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.ndim >= 2 and outputs.shape[1] >= 2:
        labels = targets.argmax(1) if _are_probabilities(targets, outputs.shape) else targets
        predicted = outputs.argmax(1)
        if labels.shape == predicted.shape and not labels.is_floating_point():
            classes = labels.long()
            if bool(((classes >= 0) & (classes < outputs.shape[1])).all()):
                return int((predicted != classes).sum()) / classes.numel()
    shapes = [tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in (outputs, targets)]
    raise NoErrorRateError(
        f"The error rate needs outputs (N, classes, ...) of at least 2 classes, and targets (N, ...) with classes from "
        f"0 on, or probabilities of them; got {shapes[0]} and {shapes[1]}. For other outputs use metric='loss'."
    )


def _are_probabilities(targets: Tensor, shape: torch.Size) -> bool:
    if not targets.is_floating_point() or targets.shape != shape:
        return False
    sums = targets.sum(1)
    return bool((targets >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-2)
