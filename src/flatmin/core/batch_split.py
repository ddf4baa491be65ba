"""Splits a batch into the part that SAM corrects, in micro-batches, and the rest."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

Batch = Tensor | tuple[Tensor, ...] | list[Tensor] | Mapping[str, Tensor]


class BatchSplit(NamedTuple):
    """A batch in pieces, each built like the batch."""

    micro_batches: list[Any]
    """What SAM is applied to, each with its own perturbation."""
    rest: Any | None
    """What takes a plain pass; None if there is no rest."""
    sizes: list[int]
    """The number of examples of each piece; the rest's comes last."""


def split_batch(batch: Batch, part: float, m: int | None) -> BatchSplit:
    """Return the first ``part`` of a batch in micro-batches of m examples (the last may be smaller), and the rest.

    Raises:
        TypeError: the batch is not made of tensors, or part or m is not a number.
        ValueError: tensors of different lengths, part outside (0, 1] or of less than one example, m below 1 or larger
            than the part.

    Example:
        >>> import torch
        >>> split_batch(torch.arange(10), part=0.5, m=3)
        BatchSplit(micro_batches=[tensor([0, 1, 2]), tensor([3, 4])], rest=tensor([5, 6, 7, 8, 9]), sizes=[3, 2, 5])
    """
    length = _length(batch)
    size = _part_size(part, length)
    if m is not None and (isinstance(m, bool) or not isinstance(m, int)):
        raise TypeError(f"m must be a whole number of examples or None, got {m!r}.")
    if m is not None and not 1 <= m <= size:
        raise ValueError(
            f"m must be at least 1 and at most the {size} examples that SAM is applied to (part={part:g} of "
            f"{length}), got {m}. Use a smaller m, a larger part, or drop_last=True in the loader if this is a short "
            "last batch."
        )
    edges = [*range(0, size, m or size), size]
    micro_batches = [_narrow(batch, start, stop) for start, stop in itertools.pairwise(edges)]
    sizes = [stop - start for start, stop in itertools.pairwise(edges)]
    if size == length:
        return BatchSplit(micro_batches, None, sizes)
    return BatchSplit(micro_batches, _narrow(batch, size, length), [*sizes, length - size])


def call_with(loss_fn: Callable[..., Tensor], batch: Batch) -> Tensor:
    """Return ``loss_fn(*batch)`` for a tuple or list, ``loss_fn(batch)`` for a tensor or dict."""
    return loss_fn(*batch) if isinstance(batch, tuple | list) else loss_fn(batch)


def _part_size(part: float, length: int) -> int:
    if isinstance(part, bool) or not isinstance(part, int | float):
        raise TypeError(f"part must be a number in (0, 1], got {part!r} of type {type(part).__name__}.")
    if not 0 < part <= 1:
        raise ValueError(f"part must be in (0, 1], got {part!r}: the share of the batch that SAM is applied to.")
    size = round(part * length)
    if size < 1:
        raise ValueError(
            f"part={part:g} of a batch of {length} is less than one example. Use a part of at least {1 / length:g}, "
            "larger batches, or drop_last=True in the loader if this is a short last batch."
        )
    return size


def _tensors(batch: Batch) -> list[Any]:
    if isinstance(batch, Tensor):
        return [batch]
    return list(batch.values()) if isinstance(batch, Mapping) else list(batch)


def _length(batch: Batch) -> int:
    if not isinstance(batch, Tensor | tuple | list | Mapping):
        raise TypeError(
            f"batch must be a tensor, or a tuple, list or dict of tensors, got {type(batch).__name__}. For anything "
            "else, pass closures: step([closure], rest=..., weights=[...])."
        )
    tensors = _tensors(batch)
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            found = "a tensor without dimensions" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise TypeError(f"batch must hold tensors with examples along the first dimension, got {found}.")
    lengths = {len(tensor) for tensor in tensors}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"batch must hold tensors of one length, at least 1, got {[len(tensor) for tensor in tensors]}: the first "
            "dimension counts examples."
        )
    return lengths.pop()


def _narrow(batch: Batch, start: int, stop: int) -> Any:
    """Return some examples of a batch, built like it, as views."""
    if isinstance(batch, Tensor):
        return batch[start:stop]
    if isinstance(batch, Mapping):
        return {name: tensor[start:stop] for name, tensor in batch.items()}
    return [tensor[start:stop] for tensor in batch]
