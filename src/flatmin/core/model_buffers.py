"""Keeps a model's buffers as the first pass left them."""

import torch
from torch import Tensor, nn


class ModelBuffers:
    """A copy of all buffers of a model at the moment it was made, to be put back by ``restore()``.

    Buffers describe what the model has seen at w: running statistics of batch norm, codebooks that follow the data by
    an exponential moving average, ranges of quantization observers, the vectors of spectral norm. The passes at w + eps
    must not touch them, so **every** buffer is copied after the first pass and put back, in place, after the last one.
    That leaves compiled graphs, SyncBatchNorm and third-party layers alone, unlike setting ``momentum = 0``, which
    still counts batches and loses the momentum for good when done twice. The layers are looked up each time, so that
    a layer replaced during training is seen.

    Args:
        model: the model, or None for nothing to keep.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module | None) -> None:
        self._copies: list[tuple[nn.Module, str, Tensor, Tensor]] = [
            (module, name, buffer, buffer.clone())
            for module in (model.modules() if model is not None else ())
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put the values back, in the tensors that had them."""
        for module, name, buffer, copy in self._copies:
            module._buffers[name] = buffer  # a layer may have assigned a new one
            buffer.copy_(copy)


def has_running_statistics(model: nn.Module | None) -> bool:
    """Return whether a pass of the model, in its present mode, updates running statistics."""
    modules = model.modules() if model is not None else ()
    return any(m.training and any(name.startswith("running_") for name in m._buffers) for m in modules)
