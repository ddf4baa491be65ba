"""Which weights of a model are measured, and vectors over them."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

Params = Iterable[nn.Parameter | str]
"""Parameters of the model, or their names."""


def parameter_names(model: nn.Module, params: Params | None) -> list[str]:
    """Return the names of the chosen parameters, in the model's order; tied ones once."""
    named = dict(model.named_parameters())
    if params is None:
        names = [name for name, p in named.items() if p.requires_grad]
        if not names:
            raise ValueError("model has no parameter that requires a gradient. Choose weights with params=.")
        return names
    if isinstance(params, str | Tensor):
        raise TypeError(f"params must be an iterable of parameters or names, got a {type(params).__name__}: use [it].")
    by_id = {id(p): name for name, p in named.items()}
    chosen = set()
    for choice in params:
        name = choice if isinstance(choice, str) else by_id.get(id(choice))
        if name not in named:
            what = repr(choice) if isinstance(choice, str) else f"a {type(choice).__name__}"
            raise ValueError(f"params holds {what}, which is not a parameter of the model; its names: {list(named)}.")
        chosen.add(name)
    if not chosen:
        raise ValueError("params is empty: there is nothing to measure. Leave it None for all weights.")
    return [name for name in named if name in chosen]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module that a compiled model wraps; raise for models whose weights are stored elsewhere."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise TypeError(f"model is wrapped in {type(model).__name__}: pass model.module, and group= for sharded data.")
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def flatten(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the tensors as one vector, in order."""
    return torch.cat([t.reshape(-1).to(dtype) for t in tensors])


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a vector in the shapes and dtypes of the tensors it runs over.

    Example:
        >>> unflatten(torch.arange(3.0), [torch.zeros(1, 2), torch.zeros(1)])
        [tensor([[0., 1.]]), tensor([2.])]
    """
    parts = torch.split(vector, [t.numel() for t in like])
    return [part.view_as(t).to(t.dtype) for part, t in zip(parts, like, strict=True)]
