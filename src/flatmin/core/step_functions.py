"""The functions that users give a step: `direction`, which makes a direction of gradients, and `combine`."""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flatmin.core import ddp, dtensor
from flatmin.core.compat import flattens_optimizer_state, is_checkpoint

Gradients = Mapping[Tensor, Tensor | None]
DirectionFunction = Callable[[list[Tensor]], Sequence[Tensor]]
CombineFunction = Callable[[list[Tensor], list[Tensor]], Sequence[Tensor]]


class StepFunction:
    """A function of lists of gradients, one tensor per parameter, that returns such a list.

    A missing gradient is given as zeros, a sparse one as a dense one, a sharded one as this rank's part. A function
    with ``state_dict`` and ``load_state_dict`` is part of checkpoints.
    """

    def __init__(self, name: str, function: Callable[..., Sequence[Tensor]]) -> None:
        self.name, self.key, self.function = name, f"sam_{name}", function
        self.has_state = hasattr(function, "state_dict") and hasattr(function, "load_state_dict")
        self._is_called = self._is_checked = False

    def check_shards(self, parameters: Iterable[Tensor]) -> None:
        """Raise if the function would see parts of parameters without having declared that this is fine."""
        if getattr(self.function, "elementwise", False) is not True and any(map(dtensor.is_sharded, parameters)):
            raise ValueError(
                f"{self.name} is a function, but parameters are sharded (FSDP2, tensor parallelism), so it would see "
                "only this rank's part of each gradient: norms, means and top-k would be wrong. If it works on each "
                "element by itself, say so with `function.elementwise = True`; otherwise train without sharding."
            )

    @torch.no_grad()
    def __call__(self, parameters: Sequence[Tensor], *gradients: Gradients) -> dict[Tensor, Tensor]:
        """Return what the function makes of the gradients, for each parameter; of sharded ones, this rank's part.

        Raise if it changed its inputs or returned anything but finite tensors like them. Whether they are finite is
        checked once, because that waits for the device.
        """
        self.check_shards(parameters)
        inputs = [[_dense(p, grads.get(p)) for p in parameters] for grads in gradients]
        versions = [tensor._version for tensors in inputs for tensor in tensors]
        results = self.function(*(list(tensors) for tensors in inputs))
        self._is_called = True
        now = [tensor._version for tensors in inputs for tensor in tensors]
        if now != versions:
            changed = {i % len(parameters) for i, version in enumerate(versions) if now[i] != version}
            names = ", ".join(map(str, sorted(changed)))
            raise ValueError(f"{self.name} changed the gradient of parameter {names} in place. Return new tensors.")
        self._check(results, inputs[0])
        if not self._is_checked:
            self._check_finite(results, inputs)
        return dict(zip(parameters, results, strict=True))

    def _check(self, results: object, like: list[Tensor]) -> None:
        if isinstance(results, Tensor | str) or not isinstance(results, Sequence):
            kind = "None" if results is None else f"a {type(results).__name__}"
            raise TypeError(f"{self.name} must return a list of {len(like)} tensors, one per gradient, got {kind}.")
        if len(results) != len(like):
            raise ValueError(
                f"{self.name} returned {len(results)} tensors for {len(like)} gradients: it must return one for each."
            )
        for index, (result, grad) in enumerate(zip(results, like, strict=True)):
            if not isinstance(result, Tensor):
                raise TypeError(f"{self.name} returned a {type(result).__name__}, not a tensor, for parameter {index}.")
            if _kind(result) != _kind(grad):
                raise ValueError(
                    f"{self.name} returned a tensor of {_kind(result)} for parameter {index}, whose gradient is of "
                    f"{_kind(grad)}."
                )

    def _check_finite(self, results: Sequence[Tensor], inputs: list[list[Tensor]]) -> None:
        if not all(tensor.isfinite().all() for tensors in inputs for tensor in tensors):
            return  # a step that a GradScaler skips, say
        for index, result in enumerate(results):
            if not result.isfinite().all():
                raise ValueError(
                    f"{self.name} returned a tensor for parameter {index} that is not finite, of gradients that are. A "
                    "gradient may be all zeros: mind divisions by its norm."
                )
        self._is_checked = True

    # Checkpoints.

    def create_state(self, parameters: Sequence[Tensor], num_inputs: int) -> None:
        """Create the state that a checkpoint is loaded into: call a function that was never called, with zeros."""
        if self.has_state and not self._is_called:
            zeros = [[_dense(p, None) for p in parameters] for _ in range(num_inputs)]
            with torch.no_grad():
                self.function(*zeros)
            self._is_called = True

    def state_dict(self, parameters: Iterable[Tensor]) -> Any:
        """Return the function's state, or raise if torch.distributed.checkpoint would lose it."""
        if is_checkpoint() and (flattens_optimizer_state() or any(map(dtensor.is_sharded, parameters))):
            raise ValueError(
                f"torch.distributed.checkpoint cannot hold the state of {self.name}: a flattened optimizer state dict "
                "has one entry per parameter, and of sharded parameters it would keep one rank's state for all. Use "
                "flatten_optimizer_state_dict=False, or torch.save(opt.state_dict()) on each rank."
            )
        return self.function.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        """Load the function's state from a copy, which it may keep and change."""
        self.function.load_state_dict(copy.deepcopy(state))  # type: ignore[attr-defined]
        self._is_called = True

    @contextlib.contextmanager
    def unchanged(self, *, only_on_error: bool = False) -> Iterator[None]:
        """Put the function's state back at the end of the block, or only if it raises."""
        if not self.has_state:
            yield
            return
        before, was_called = copy.deepcopy(self.function.state_dict()), self._is_called  # type: ignore[attr-defined]
        put_back = True
        try:
            yield
            put_back = not only_on_error
        finally:
            if put_back:
                self.function.load_state_dict(before)  # type: ignore[attr-defined]
                self._is_called = was_called


def kept_gradients(parameters: Iterable[Tensor], model: nn.Module | None) -> dict[Tensor, Tensor | None]:
    """Return the gradients for later; views of DDP's buckets, which the next pass overwrites, as copies."""
    overwritten = getattr(ddp.unwrap(model), "gradient_as_bucket_view", False)
    return {p: p.grad.clone() if overwritten and p.grad is not None else p.grad for p in parameters}


def combine_gradients(combine: StepFunction, first: Gradients) -> None:
    """Replace the gradients by what ``combine`` makes of the first ones and these.

    A parameter without a gradient in both passes gets none; nor does any if there was no second pass.
    """
    second = {p: p.grad for p in first}
    if all(grad is None for grad in second.values()):
        return
    for p, grad in combine([p for p in first if p.requires_grad], first, second).items():
        if first[p] is None and second[p] is None:
            continue
        if dtensor.is_sharded(p):
            p.grad = torch.empty_like(p, requires_grad=False)
            dtensor.local_part(p.grad).copy_(grad)
        else:
            p.grad = grad


def _dense(parameter: Tensor, grad: Tensor | None) -> Tensor:
    if dtensor.is_sharded(parameter):
        part = dtensor.local_part(parameter)
        return torch.zeros_like(part) if grad is None else dtensor.local_gradient(parameter, grad).detach()
    if grad is None:
        return torch.zeros_like(parameter, requires_grad=False)
    return grad.detach() if grad.layout is torch.strided else grad.detach().to_dense()


def _kind(tensor: Tensor) -> str:
    shape, layout = tuple(tensor.shape), "" if tensor.layout is torch.strided else f", {tensor.layout}"
    return f"shape {shape}, {tensor.dtype} on {tensor.device}{layout}"
