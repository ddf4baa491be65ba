"""Puts the weights of a local file into a model; only plain tensors are ever unpickled."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from flatmin.lab.errors import ModelError

WRAPPERS = ("state_dict", "model", "network")  # under which training scripts keep the weights
NEW_HEAD_STD = 0.01
"""Of a new last layer's weights: large logits of random weights send gradients that destroy what was learned before."""


def load_weights(network: nn.Module, path: str, *, head: str, head_choice: Literal["auto", "new", "keep"]) -> None:
    """Load a checkpoint file into a model, in place; its last layer is called ``head``.

    A new last layer gets small random weights from torch's generator; ``auto`` makes one if its shape differs.
    """
    weights = _rename_like(network, read_weights(path))
    own = network.state_dict()
    head_keys = [key for key in own if key.startswith(f"{head}.")]
    same_shape = all(key in weights and weights[key].shape == own[key].shape for key in head_keys)
    if head_choice == "keep" and not same_shape:
        raise ModelError(
            f"model.head is keep, but the last layer of {path} has {_shape(weights, head)} and the model "
            f"{_shape(own, head)}. Use model.head new for another number of classes."
        )
    if head_choice == "new" or not same_shape:
        fresh = {key: torch.zeros_like(own[key]) for key in head_keys}
        nn.init.normal_(fresh[f"{head}.weight"], std=NEW_HEAD_STD)
        weights = {**weights, **fresh}
    missing = sorted(own.keys() - weights.keys())
    unknown = sorted(weights.keys() - own.keys())
    wrong = sorted(key for key in own.keys() & weights.keys() if not _fits(weights[key], own[key]))
    if missing or unknown or wrong:
        raise ModelError(
            f"{path} does not belong to this model: {len(missing)} tensors are missing {missing[:3]}, "
            f"{len(unknown)} unknown {unknown[:3]}, {len(wrong)} of another shape or type {wrong[:3]}."
        )
    network.load_state_dict(weights)


def read_weights(path: str) -> dict[str, Tensor]:
    """Return the named tensors of a file; a ModelError says why it cannot be used."""
    if not Path(path).is_file():
        raise ModelError(
            f"model.checkpoint: there is no file {path}. Give the path of a file of weights (.safetensors or "
            "torch's), or run:NAME for another run's weights, or omit model.checkpoint to start from random ones."
        )
    try:
        if path.endswith(".safetensors"):
            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises errors of many types over bytes that are not its own
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"model.checkpoint: {path} cannot be read ({why}). It is corrupt, or "
            "holds more than tensors: pickled objects are never loaded. Save a state_dict, or use safetensors."
        ) from error
    for wrapper in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and _is_plain(value) for name, value in content.items()
    ):
        raise ModelError(
            f"model.checkpoint: {path} does not map names to tensors (dense, not quantized, not on `meta`)."
        )
    # What DistributedDataParallel and torch.compile put in front of names.
    return {name.removeprefix("module.").removeprefix("_orig_mod."): tensor for name, tensor in content.items()}


def _fits(tensor: Tensor, own: Tensor) -> bool:
    """Return whether a tensor has the shape of one of the model's, and real numbers where that one has them."""
    is_real = tensor.is_floating_point() == own.is_floating_point() and not tensor.is_complex()
    return tensor.shape == own.shape and is_real


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_quantized or value.is_meta)


def _rename_like(network: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give our names to an EfficientNet of the package efficientnet_pytorch, or to a ResNet of Li et al. (2018).

    They have the same layers in the same order, under other names (``_blocks.3._depthwise_conv`` and
    ``blocks.2.0.conv_dw``). Order, kind (weight, bias, running_mean, ...) and shape of all but the last layer
    must agree. Files of old versions of torch lack batch norm's counters, which nothing here uses.
    """
    own = network.state_dict()
    known = "_conv_stem.weight" in weights or {"layer1.0.conv1.weight", "linear.weight"} <= weights.keys()
    if not known or weights.keys() == own.keys():
        return weights
    counters = {key: tensor for key, tensor in own.items() if key.endswith(".num_batches_tracked")}
    names = [key for key in own if key not in counters]
    theirs = {key: tensor for key, tensor in weights.items() if not key.endswith(".num_batches_tracked")}
    renamed = dict(zip(names, theirs.values(), strict=False))
    same_kinds = [a.rpartition(".")[2] for a in names] == [b.rpartition(".")[2] for b in theirs]
    if not same_kinds or any(own[key].shape != renamed[key].shape for key in names[:-2]):
        return weights
    return {key: counters.get(key, renamed.get(key, own[key])) for key in own}


def _shape(weights: Mapping[str, Tensor], head: str) -> str:
    weight = weights.get(f"{head}.weight")
    return "no such layer" if weight is None else f"{weight.shape[0]} classes"
