"""Parameter groups for SAM-ON: only normalization layers are perturbed."""

from typing import Any

from torch import nn


def norm_parameters(model: nn.Module) -> list[dict[str, Any]]:
    """Return all parameters in two groups: normalization layers', and the others with a radius of 0.

    Pass them to the base optimizer: all are trained, and SAM perturbs the first group only (SAM-ON, Müller et al.,
    2023). A normalization layer is a module with "Norm" in the name of its class or of a base class, as in
    torch, timm and Hugging Face. Parameters of modules inside it do not count.

    Args:
        model: the model.

    Returns:
        Groups for an optimizer, to which you may add settings such as ``weight_decay``.

    Raises:
        TypeError: model is not an nn.Module.
        ValueError: it has no normalization layer with parameters.

    Example:
        >>> import torch
        >>> from flatmin import SAM
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
        >>> opt = SAM(torch.optim.SGD(norm_parameters(model), lr=0.1), rho=0.5)
        >>> [tuple(p.shape) for p in opt.perturbed_parameters]
        [(3,), (3,)]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}. Pass the model, not its parameters.")
    layers = [m for m in model.modules() if any("Norm" in kind.__name__ for kind in type(m).__mro__)]
    norm = dict.fromkeys(p for layer in layers for p in layer.parameters(recurse=False))
    others = [p for p in model.parameters() if p not in norm]
    if not norm:
        raise ValueError(
            "model has no normalization layer with parameters: no module with 'Norm' in the name of its class has any. "
            "Build the groups yourself, with sam_rho=0.0 in the group of the parameters that SAM leaves alone."
        )
    return [{"params": list(norm)}, *([{"params": others, "sam_rho": 0.0}] if others else [])]
