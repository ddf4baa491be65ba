"""What a run is: frozen dataclasses, checked when built, kept as JSON, named by a hash.

Every field is a flag of ``flatmin train``, with the docstring below it as its help. Two specs that differ
only in ``name`` are the same run. Fields at their defaults take no part in the hash, so a field added
later, with a default that means "as before", leaves the names of finished runs as they are.
"""

import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass, field
from typing import Literal

from flatmin.lab.errors import SpecError
from flatmin.lab.spec.datasets import DATASETS, FOLDER_PREFIX, dataset_info
from flatmin.lab.spec.fields import build, conform, did_you_mean, field_error, plain, require
from flatmin.lab.spec.models import check_model_name
from flatmin.lab.spec.optim import Optim

__all__ = ["Data", "Experiment", "Model", "Optim", "SpecError"]

Augment = Literal["none", "flip", "basic", "cutout", "autoaugment", "imagenet"]


@dataclass(frozen=True, kw_only=True)
class Data:
    """The examples, and how they reach the model."""

    name: str = "digits"
    """A dataset (`flatmin list` names them), or folder:PATH with PATH/{train,test}/CLASS/*.jpg."""
    augment: Augment = "none"
    """none; flip (half of the images mirrored); basic (flip, pad 4, random crop); cutout (basic + Cutout); autoaugment
    (basic + the dataset's policy + Cutout; SVHN without basic, as in the reference code); imagenet (random resized
    crop, flip)."""
    mixup: float = 0.0
    """Mixup's alpha; 0 is without."""
    cutout_size: int = 16
    """Side of Cutout's square in pixels."""
    cutout_shared: bool = False
    """One Cutout mask for the whole batch, as in the reference code, instead of one for each image."""
    batch_size: int = 128
    """Examples in a step, over all workers."""
    drop_last: bool = False
    """Leave out the last short batch (the reference code); else all batches are equally large."""
    image_size: int | None = None
    """Side of the model's input in pixels; the dataset's own (224 for photographs) if None."""
    resize: Literal["bilinear", "bicubic"] = "bilinear"
    """How images are brought to image_size (the reference code: bicubic)."""
    crop_padding: int | None = None
    """Evaluate photographs on the central size / (size + crop_padding) of the shorter side (the reference code: 32);
    on 7/8 of it if None."""
    train_size: int | None = None
    """Train on a random subset of this many examples; all if None."""
    validation: float = 0.0
    """Fraction of the training set held out as a clean validation set (0.1 in the paper)."""
    label_noise: float = 0.0
    """Fraction of the training labels replaced by another class; test and validation stay clean."""
    noisy_validation: bool = False
    """Make the labels of the validation set as noisy as the training set's, as if no clean labels existed."""
    bootstrap: bool = False
    """Train twice: as without it, then from scratch on the labels that the first model predicts (Section 3.3)."""
    extra: bool = False
    """SVHN: train on the 531,131 additional images too."""
    seed: int = 0
    """Fixes the validation split, the subset and the label noise (shared by replicas)."""

    def __post_init__(self) -> None:
        conform(self)
        if self.name not in DATASETS and not (self.name.startswith(FOLDER_PREFIX) and self.name != FOLDER_PREFIX):
            raise field_error(
                self, "name", f"one of {', '.join(DATASETS)}, or folder:PATH", did_you_mean(self.name, DATASETS)
            )
        small = dataset_info(self.name).in_memory
        crops = f"another one: imagenet crops photographs, and {self.name} has small images"
        clean = "false where there is no validation set or no label_noise"
        padding = f"at least 0 and only for photographs; {self.name} has small images"
        require(
            self,
            ("augment", self.augment != "imagenet" or not small, crops),
            ("mixup", 0 <= self.mixup <= 1e6, "at least 0 (0 is without Mixup) and at most 1e6"),
            ("cutout_size", self.cutout_size >= 1, "at least 1 pixel"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("image_size", self.image_size is None or 8 <= self.image_size <= 8192, "at least 8 and at most 8192"),
            ("crop_padding", self.crop_padding is None or (self.crop_padding >= 0 and not small), padding),
            ("train_size", self.train_size is None or self.train_size >= 1, "at least 1, or None for all"),
            ("validation", 0 <= self.validation < 1, "in [0, 1); the paper holds out 0.1"),
            ("label_noise", 0 <= self.label_noise <= 1, "in [0, 1]; the paper has 0.2, 0.4, 0.6 and 0.8"),
            ("noisy_validation", not self.noisy_validation or (self.validation > 0 and self.label_noise > 0), clean),
            ("extra", not self.extra or self.name == "svhn", "false: only svhn has additional images"),
            ("seed", 0 <= self.seed < 2**64, "at least 0 and below 2**64"),
        )


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model, and the weights it starts from."""

    name: str = "wrn-16-2"
    """wrn-DEPTH-WIDTH, resnet-20/32/44/56/110[-projection|-noshort], shake-shake-26-2xWIDTHd,
    pyramidnet-DEPTH-ALPHA[-shakedrop], cnn-WIDTH, vit-DEPTH-WIDTH-PATCH, mlp-DEPTH-WIDTH, char-transformer-DEPTH-WIDTH
    (for python-text), resnet-50/101/152, efficientnet-b7, efficientnet-l2, or
    timm/NAME."""
    norm: Literal["batch", "none"] = "batch"
    """none: a Wide ResNet without batch norm, started as in SkipInit (the Hessian figure)."""
    design: Literal["standard", "reference"] = "standard"
    """reference: Wide ResNet, Shake-Shake and PyramidNet as in the paper's reference code: the last layer starts as
    U(-1/sqrt(classes), 1/sqrt(classes)), and shortcuts differ (see the model's docstring)."""
    dropout: float = 0.0
    """Dropout before the last layer; only wrn-* and models from timm (0.5 for EfficientNet in the reference code)."""
    drop_connect: float = 0.0
    """Stochastic depth of the last block, rising linearly from 0; only models from timm (reference code: 0.2)."""
    checkpoint: str | None = None
    """File of weights to start from (.safetensors, or torch's), or run:NAME, a finished run in the same directory."""
    head: Literal["auto", "new", "keep"] = "auto"
    """The last layer of a checkpoint: new initializes it afresh, keep needs the same number of classes, auto
    keeps it where the number of classes is the same."""
    freeze_batch_norm: bool = False
    """Normalize with the checkpoint's batch-norm statistics and leave them (fine-tuning, Appendix C.2)."""

    def __post_init__(self) -> None:
        conform(self)
        try:
            family = check_model_name(self.name).family
        except ValueError as error:
            raise field_error(self, "name", str(error)) from None
        differs = self.norm == "batch" and family in ("wrn", "shake-shake", "pyramidnet")
        only = "standard: only wrn-* with batch norm, shake-shake-* and pyramidnet-* differ"
        fresh = "false where there is no checkpoint: fresh statistics (0 and 1) normalize nothing"
        require(
            self,
            ("norm", self.norm == "batch" or family == "wrn", "batch: only wrn-* goes without"),
            ("design", self.design == "standard" or differs, only),
            ("dropout", 0 <= self.dropout < 1, "in [0, 1)"),
            ("drop_connect", 0 <= self.drop_connect < 1, "in [0, 1)"),
            ("dropout", self.dropout == 0 or family in ("timm", "wrn"), "0: only wrn-* and models from timm have it"),
            ("drop_connect", self.drop_connect == 0 or family == "timm", "0: only models from timm have it"),
            ("head", self.head == "auto" or self.checkpoint is not None, "auto where there is no checkpoint"),
            ("freeze_batch_norm", not self.freeze_batch_norm or self.checkpoint is not None, fresh),
        )

    def without_checkpoint(self) -> "Model":
        """Return the same model with fresh weights."""
        return dataclasses.replace(self, checkpoint=None, head="auto", freeze_batch_norm=False)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One model trained on one dataset; with a seed it is a run."""

    name: str = ""
    """A label; it does not change the run."""
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    optim: Optim = field(default_factory=Optim)
    epochs: int = 10
    """Passes over the training set; 0 only evaluates model.checkpoint."""
    evaluate_every: int = 1
    """Evaluate every this many epochs, and after the last one."""
    keep_every: int | None = None
    """Save the initial weights and the weights after every this many epochs, to measure them; only the last if None."""
    stop_loss: float | None = None
    """Stop after the first epoch whose mean training loss is at most this (the schedule still spans all epochs)."""
    target_loss: float | None = None
    """Stop within 10 % of this loss on the training set, evaluated after every epoch as at test time, once the learning
    rate has decayed: to 0.3 of the schedule's at 10 times this loss, to 0.1 at 4 times, then as the loss falls."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """bfloat16: autocast (weights stay float32); auto does that if the hardware supports it."""
    compile: bool = False
    """Compile the model with torch.compile: slow to start, then faster."""

    def __post_init__(self) -> None:
        conform(self)
        only_evaluates = self.epochs == 0 and self.model.checkpoint is not None
        trains, m = 1 <= self.epochs <= 10**9, self.optim.m
        aims = self.target_loss is None or (self.target_loss > 0 and self.stop_loss is None)
        warms_up = self.optim.warmup_epochs < self.epochs or only_evaluates
        require(
            self,
            ("name", self.name.isprintable(), "printable text"),
            ("epochs", trains or only_evaluates, "at least 1 (or 0 with a model.checkpoint) and at most 1e9"),
            ("evaluate_every", self.evaluate_every >= 1, "at least 1"),
            ("keep_every", self.keep_every is None or self.keep_every >= 1, "at least 1, or None"),
            ("stop_loss", self.stop_loss is None or self.stop_loss > 0, "positive, or None"),
            ("target_loss", aims, "positive, or None; None with stop_loss"),
        )
        is_text, reads_text = self.data.name == "python-text", self.model.name.startswith("char-transformer-")
        only_there = f"char-transformer-* with python-text and only there; here {self.data.name}"
        require(self.model, ("name", is_text == reads_text, only_there))
        require(self.data, ("augment", self.data.augment == "none" or not is_text, "none: python-text is not images"))
        size = self.data.batch_size
        require(
            self.optim,
            ("warmup_epochs", warms_up, f"less than epochs, which is {self.epochs}"),
            ("m", m is None or m <= size, f"at most data.batch_size, which is {size}"),
        )

    def to_json(self) -> str:
        """Return the whole spec as JSON; `from_json` gives an equal one back."""
        return json.dumps(plain(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Experiment":
        """Read what `to_json` wrote; a field that is left out has its default.

        Raises:
            SpecError: the text is not JSON, or a field is unknown or has a value that is not allowed.
        """
        try:
            tree = json.loads(text)
        except json.JSONDecodeError as error:
            raise SpecError(f"This is not a spec in JSON: {error}.") from None
        experiment: Experiment = build(cls, tree, "")
        return experiment

    def first_stage(self) -> "Experiment":
        """Return the experiment whose model relabels the training set of this one (``data.bootstrap``)."""
        return dataclasses.replace(self, data=dataclasses.replace(self.data, bootstrap=False))

    def run_hash(self) -> str:
        """Return ten hexadecimal digits that name this experiment, equal on every machine."""
        return self._hash

    @functools.cached_property
    def _hash(self) -> str:
        tree = plain(self, leave_defaults_out=True)
        tree.pop("name", None)
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:10]

    def run_name(self, seed: int) -> str:
        """Return the name of the run's directory: what it is, in brief, then the hash and the seed.

        Raises:
            SpecError: the seed is out of range.
        """
        if not 0 <= seed < 2**64:
            raise SpecError(f"seed must be at least 0 and below 2**64; got {seed}.")
        dataset = "folder" if self.data.name.startswith(FOLDER_PREFIX) else self.data.name
        method = f"sam{self.optim.rho_text}" if self.optim.uses_sam else self.optim.name
        return f"{dataset}-{self.model.name.replace('/', '_')}-{method}-{self.run_hash()}-seed{seed}"


SECOND_ORDER_PASSES = 4
"""The two gradients of SAM, and the product with the Hessian, which costs about two more."""


def passes_per_step(experiment: Experiment) -> float:
    """Return the forward and backward passes of a step, on average: 1 without SAM, 2 with it, 1 + part on a part.

    Each further ascent step is one more; m adds none.

    A random direction needs no gradient at w, but batch norm needs a pass there for its statistics.
    """
    optim, model = experiment.optim, experiment.model
    if not optim.uses_sam:
        return 1
    if optim.second_order:
        return SECOND_ORDER_PASSES
    if optim.direction == "momentum" or optim.weight == 0:
        return 1
    if optim.ascent_part < 1:
        return 1 + optim.ascent_part
    plain = optim.part == 1 and optim.every == 1 and (model.norm == "none" or model.name.startswith("cnn-"))
    if optim.direction == "random" and plain:
        return 1
    return 1 + optim.ascent_steps * optim.part / optim.every
