"""Keeps the buffers of normalization layers as the first pass left them."""

import torch
from torch import Tensor, nn


class NormalizationBuffers:
    """The running statistics of a model's normalization layers.

    Running statistics describe the activations at w. The passes at w + eps must not touch them, so their buffers are
    copied after the first pass and put back, in place, after the last one. That leaves compiled graphs, SyncBatchNorm
    and third-party layers alone, unlike setting ``momentum = 0`` (which still counts batches, and is lost for good when
    done twice). A layer counts as one of normalization when it has a buffer whose name starts with ``running_``.

    Args:
        model: the model, or None for nothing to keep.
    """

    def __init__(self, model: nn.Module | None) -> None:
        # The names and not the tensors: `model.to(device)` replaces the tensors.
        self._slots = [
            (module, name)
            for module in (model.modules() if model is not None else ())
            if any(name.startswith("running_") for name in module._buffers)
            for name in module._buffers
        ]
        self._kept: list[tuple[nn.Module, str, Tensor, Tensor]] = []

    def present(self) -> bool:
        """Return whether a pass in the model's present mode would change any."""
        return any(module.training for module, _ in self._slots)

    @torch.no_grad()
    def save(self) -> None:
        """Remember the buffers, whatever the layers' mode: a closure may change that."""
        self._kept = [
            (module, name, buffer, buffer.clone())
            for module, name in self._slots
            if (buffer := module._buffers[name]) is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put the remembered values back, in the tensors that held them."""
        for module, name, buffer, kept in self._kept:
            module._buffers[name] = buffer  # a layer may have assigned a new one
            buffer.copy_(kept)
        self._kept = []
