"""Batches of (inputs, targets): their sizes, their rows, and whether they come twice the same."""

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from flatmin.core.pass_state import generators_unchanged

Batch = tuple[Any, Any]
"""Inputs (a tensor, or a tuple or dict of tensors) and targets, all with the examples along dimension 0."""


def tree_map(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply a function to every tensor of nested tuples, lists and dicts; leave all else as it is."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        # A dict of its own class, such as a ModelOutput, has its entries as attributes too.
        mapped = _copy(tree) if isinstance(tree, dict) else {}
        for key, value in tree.items():
            mapped[key] = tree_map(function, value)
        return mapped
    if isinstance(tree, tuple | list):
        parts = [tree_map(function, value) for value in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


def _copy(tree: dict[Any, Any]) -> dict[Any, Any]:
    try:
        return copy.copy(tree)
    except KeyError:  # Python 3.10 looks for __getstate__ among the entries, if they are attributes too
        return type(tree)(tree)


def leaves(tree: Any) -> list[Tensor]:
    """Return every tensor of nested tuples, lists and dicts, in order."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    tree_map(keep, tree)
    return found


def check_data(data: Any) -> None:
    """Raise unless data can be passed over more than once."""
    if isinstance(data, Tensor) or not isinstance(data, Iterable):
        raise TypeError(
            f"data must be an iterable of (inputs, targets) batches, got {type(data).__name__}. "
            "For one batch pass [(inputs, targets)]."
        )
    if isinstance(data, Iterator):
        raise TypeError(
            f"data is a one-shot iterator ({type(data).__name__}), and measuring takes several passes. "
            "Pass list(data), or the DataLoader itself."
        )


def check_batch(batch: Any) -> int:
    """Return the number of examples of a batch, or raise if it is not (inputs, targets) of one length."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        got = f"{type(batch).__name__} of length {len(batch)}" if hasattr(batch, "__len__") else type(batch).__name__
        raise TypeError(f"data must yield batches (inputs, targets), got a {got}.")
    tensors = leaves(batch)
    if not tensors or any(t.ndim == 0 for t in tensors):
        raise TypeError("data must yield tensors with the examples along dimension 0, got a batch without tensors.")
    sizes = {len(t) for t in tensors}
    if len(sizes) > 1:
        raise ValueError(f"Every tensor of a batch must hold the same number of examples, got {sorted(sizes)}.")
    return sizes.pop()


def rows(batch: Batch, start: int, stop: int) -> Batch:
    """Return examples start to stop of a batch, as views.

    Example:
        >>> rows((torch.arange(5), torch.arange(5)), 1, 3)
        (tensor([1, 2]), tensor([1, 2]))
    """
    inputs, targets = batch
    return tree_map(lambda t: t[start:stop], inputs), tree_map(lambda t: t[start:stop], targets)


def pieces(batches: Iterable[Batch], size: int | None) -> Iterator[tuple[Batch, int]]:
    """Yield each batch with its number of examples, cut into pieces of at most size; skip empty ones."""
    for batch in batches:
        num = check_batch(batch)
        step = num if size is None else size
        for start in range(0, num, max(step, 1)):
            stop = min(start + step, num)
            yield (batch if stop - start == num else rows(batch, start, stop)), stop - start


def subsets(batches: Iterable[Batch], m: int, size: int | None = None) -> Iterator[list[Batch]]:
    """Yield disjoint, consecutive subsets of m examples as lists of pieces; the last may be short.

    Example:
        >>> data = [(torch.arange(3), torch.zeros(3)), (torch.arange(3, 5), torch.zeros(2))]
        >>> [[inputs.tolist() for inputs, _ in subset] for subset in subsets(data, m=2)]
        [[[0, 1]], [[2], [3]], [[4]]]
    """
    subset: list[Batch] = []
    room = m
    for piece, num in pieces(batches, size):
        start = 0
        while start < num:
            stop = min(start + room, num)
            subset.append(rows(piece, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield subset
                subset, room = [], m
    if subset:
        yield subset


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the shapes, dtypes and bytes of tensors."""
    state = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        state.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        state.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


@contextmanager
def measuring(data: object = None) -> Iterator[None]:
    """Measure in full float32, and leave every random state as it was.

    TF32 would round the factors of products to 10 bits, and small differences of losses would be lost.
    """
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    flags: list[tuple[Any, str, Any]] = [(cuda.matmul, "allow_tf32", False), (cudnn, "allow_tf32", False)]
    if hasattr(cudnn, "conv"):  # since torch 2.9
        flags = [(owner, "fp32_precision", "ieee") for owner in (cuda.matmul, cudnn.conv, cudnn.rnn)]
    before = [getattr(owner, name) for owner, name, _ in flags]
    try:
        for owner, name, value in flags:
            setattr(owner, name, value)
        with preserve_rng_state(data):
            yield
    finally:
        for (owner, name, _), value in zip(flags, before, strict=True):
            setattr(owner, name, value)


def preserve_rng_state(data: object = None) -> AbstractContextManager[None]:
    """Leave every global random state (torch, CUDA, numpy, random), and a loader's own, as it was."""
    # Asking for the state of a GPU that nobody used yet would start CUDA.
    num_gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    return generators_unchanged(data, [torch.device("cuda", i) for i in range(num_gpus)])
