"""Builds models from a `Model` spec: the paper's small models from here, all others from timm."""

from difflib import get_close_matches
from typing import Any

from torch import nn

from flatmin.lab.errors import ModelError
from flatmin.lab.models.layers import start_head_uniform
from flatmin.lab.models.pyramidnet import PyramidNet
from flatmin.lab.models.resnets import ResNetCifar, Shortcut, WideResNet
from flatmin.lab.models.shake import ShakeShakeNet
from flatmin.lab.models.small import MLP, CharTransformer, PlainCNN, VisionTransformer
from flatmin.lab.models.weights import load_weights
from flatmin.lab.spec.experiment import Model
from flatmin.lab.spec.models import check_model_name


def build_model(model: Model, *, num_classes: int, in_channels: int = 3) -> nn.Module:
    """Return a freshly initialized model (from torch's generator), or one with a checkpoint's weights.

    A ModelError says why timm has no such model, or the checkpoint cannot be used.
    """
    network = _fresh(model, num_classes, in_channels)
    if model.design == "reference":
        start_head_uniform(network.get_submodule("head"))  # type: ignore[arg-type]
    if model.checkpoint is not None:
        load_weights(network, model.checkpoint, head=head_name(network), head_choice=model.head)
    return network


def head_name(network: nn.Module) -> str:
    """Return the name of the last layer, ``head`` in the models written here."""
    # timm's models say it in their configuration; of several classifiers the first is the model's own.
    configuration: dict[str, Any] = getattr(network, "pretrained_cfg", {})
    name = configuration.get("classifier", "head")
    return str(name[0] if isinstance(name, (tuple, list)) else name)


def input_statistics(network: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return the mean and standard deviation a model of timm was made for, if it says so."""
    configuration: dict[str, Any] = getattr(network, "pretrained_cfg", {})
    if "mean" not in configuration or "std" not in configuration:
        return None
    return tuple(configuration["mean"]), tuple(configuration["std"])


def set_training_mode(network: nn.Module, model: Model) -> None:
    """Let a model train; frozen batch norm keeps its statistics, "as we would at test time" (Appendix C.2).

    Its scale and shift are trained on.
    """
    network.train()
    for layer in network.modules() if model.freeze_batch_norm else ():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.eval()


def _fresh(model: Model, num_classes: int, in_channels: int) -> nn.Module:
    name, reference = check_model_name(model.name), model.design == "reference"
    shape = {"num_classes": num_classes, "in_channels": in_channels}
    match name.family:
        case "wrn":
            own: dict[str, Any] = {"batch_norm": model.norm == "batch", "reference": reference, **shape}
            return WideResNet(name.depth, name.width, dropout=model.dropout, **own)
        case "resnet":
            shortcuts: dict[str, Shortcut] = {"": "identity", "projection": "projection", "noshort": "none"}
            return ResNetCifar(name.depth, shortcut=shortcuts[name.variant], **shape)
        case "shake-shake":
            return ShakeShakeNet(name.depth, name.width, reference=reference, **shape)
        case "pyramidnet":
            return PyramidNet(name.depth, name.alpha, shakedrop=name.variant == "shakedrop", **shape)
        case "cnn":
            return PlainCNN(name.width, **shape)
        case "vit":
            return VisionTransformer(name.depth, name.width, name.patch_size, **shape)
        case "mlp":
            return MLP(name.depth, name.width, **shape)
        case "char-transformer":
            return CharTransformer(name.depth, name.width, **shape)
    rates = {"drop_rate": model.dropout, "drop_path_rate": model.drop_connect}
    return _from_timm(name.timm_name, num_classes, in_channels, {k: rate for k, rate in rates.items() if rate})


def _from_timm(name: str, num_classes: int, in_channels: int, rates: dict[str, Any]) -> nn.Module:
    import flatmin.lab.data.torchvision_operators  # noqa: F401  (timm imports torchvision)

    import timm  # isort: skip

    if not timm.is_model(name):
        close = get_close_matches(name, timm.list_models(), n=5, cutoff=0.4)
        raise ModelError(f"timm {timm.__version__} has no model {name!r}. The nearest are {', '.join(close)}.")
    try:
        network: nn.Module = timm.create_model(name, num_classes=num_classes, in_chans=in_channels, **rates)
    except TypeError as error:
        raise ModelError(
            f"{name} of timm {timm.__version__} has no dropout or no stochastic depth ({error}). Leave model.dropout "
            "and model.drop_connect at 0."
        ) from error
    return network
