"""Where the settings of Foret et al. (2021) come from: the paper, its reference code, or us where neither says.

By item, for the reports. The values of `settings` are not repeated here.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from flatmin.lab.foret2021 import settings
from flatmin.lab.foret2021.claims.tables import NOISE_PERCENT
from flatmin.lab.spec.experiment import Experiment
from flatmin.lab.studies.findings import Hyperparameter
from flatmin.lab.studies.printed import table_rows

Hyperparameters = tuple[Hyperparameter, ...]
Source = Literal["paper", "reference code", "ours"]
SOURCES: dict[str, Source] = {"paper": "paper", "code": "reference code", "ours": "ours"}


def read_blocks(text: str) -> dict[str, Hyperparameters]:
    r"""Read blocks of lines "source | name | value | note" under headings; an indented line continues the one before.

    Example:
        >>> (one,) = read_blocks("[images]\ncode | padding | reflected | of the\n  image")["images"]
        >>> one.source, one.name, one.value, one.note
        ('reference code', 'padding', 'reflected', 'of the image')
    """
    blocks: dict[str, list[Hyperparameter]] = {}
    for first, *rest in table_rows(text.strip().replace("\n  ", " ")):
        if not rest:
            rows = blocks.setdefault(first.strip("[]"), [])
            continue
        name, value, *note = rest
        rows.append(Hyperparameter(source=SOURCES[first], name=name, value=value, note="".join(note)))
    return {heading: tuple(rows) for heading, rows in blocks.items()}


def _grid(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _rhos(experiments: Mapping[Any, Experiment]) -> str:
    return _grid([e.optim.rho_number for e in experiments.values()])


def _tabulated(experiments: Mapping[tuple[str, str], Experiment], table: str) -> Hyperparameters:
    return tuple(
        Hyperparameter(
            name=f"{row}, {dataset}",
            value=f"learning rate {e.optim.lr:g}, weight decay {e.optim.weight_decay:g}, rho {e.optim.rho_text}",
            source="paper",
            note=table,
        )
        for (row, dataset), e in experiments.items()
    )


def settings_of(
    e: Experiment, *without: str, given: Sequence[str] = (), note: str = "not given"
) -> tuple[Hyperparameter, ...]:
    """Return the settings of an experiment, except some, with their sources: the paper if given, else ours."""
    values: dict[str, object] = {"model": e.model.name, "epochs": e.epochs, "batch size": e.data.batch_size}
    values |= {"learning rate": e.optim.lr, "weight decay": e.optim.weight_decay, "rho": e.optim.rho_number}
    values |= {"m": e.data.batch_size if e.optim.m is None else e.optim.m}
    return tuple(
        Hyperparameter(name=name, value=value, source="paper")
        if name in given
        else Hyperparameter(name=name, value=value, source="ours", note=note)
        for name, value in values.items()
        if name not in without
    )


RHOS = _grid(settings.RHO_GRID)
_BLOCKS = read_blocks(f"""
[optimizer]
code | momentum | 0.9 | Nesterov; the paper names momentum for ImageNet and fine-tuning, without Nesterov
code | gradient clipping | 5 | norm of the synchronized gradient at w + eps
code | weight decay | lambda/2 times the squared norm, in the loss | on all parameters, batch norm's too, so that it
  takes part in the perturbation; in Equation 1 it is lambda times, outside of the maximum
code | last short batch | dropped
ours | precision | auto | bfloat16 autocast where the hardware has it; the reference code has float32
[from scratch]
code | learning-rate schedule | cosine | no warm-up
code | batch-norm statistics | of the first pass | on each accelerator; averaged for evaluation
[protocol]
paper | replicas | {settings.NUM_REPLICAS} | mean and 95 % confidence interval
paper | epochs without SAM | as with SAM, or twice as many | the better of the two is reported
paper | rho grid | {RHOS} | on 10 % of the training set; here the values that the paper chose are used
paper | rho without tuning | {settings.DEFAULT_RHO}
paper | learning rate and weight decay | Table 6 or 7 | from a joint grid that is not given; not searched again
[small images]
paper | batch size | 256
paper | accelerators | 8 | each perturbs for itself, so m = 256 / 8 = 32
paper | basic augmentation | flip, padding by 4, random crop
ours | padding | black | the reference code reflects the image
code | Cutout | 16 pixels, one mask for the whole batch
code | last layer | starts as U(-1/sqrt(classes), 1/sqrt(classes)) | the usual start costs 0.5 % on CIFAR-100
code | shortcuts | WideResNet: average pooling and zero channels; Shake-Shake: without ReLU
ours | AutoAugment with Cutout | both | in the reference code Cutout is a separate flag, off by default
[table1]
paper | epochs, WRN-28-10 | 200, 1800 | two rows
code | epochs, Shake-Shake and PyramidNet+ShakeDrop | 1800 | its first README; today's has them for WRN-28-10
ours | epochs, PyramidNet | 1800 | not given; as with ShakeDrop
code | PyramidNet's depth and alpha | 272, 200 | its widths are rounded, not cut off
code | Shake-Shake's and ShakeDrop's backward coefficients | those of the forward pass in pass 1
ours | AutoAugment | the published 25 sub-policies for CIFAR-10, torchvision's | on CIFAR-10 and CIFAR-100; the
  reference code has 95 pairs with other strengths (translations by up to 225 pixels of 32)
ours | order | flip and crop, then AutoAugment | the reference code does AutoAugment first
[svhn-fashion]
ours | epochs | 200 | not given; the reference code's default
paper | SVHN's training set | 73257 + 531131 images
paper | SVHN's auto augment | the policy for SVHN, and Cutout
code | SVHN's auto augment | without the basic augmentation
paper | Fashion-MNIST's auto augment | Cutout alone
ours | normalization | mean and standard deviation of each training set | SVHN: without the additional images; the
  reference code has 0.4309, 0.4302, 0.4463 and 0.1976, 0.2003, 0.1981; for Fashion-MNIST MNIST's
[imagenet]
paper | epochs | 100, 200, 400 | nothing doubles
paper | batch size | 4096
paper | accelerators | 32 | so m = 4096 / 32 = 128, if each core perturbs for itself
paper | learning rate | 1 | cosine schedule
paper | weight decay | 0.0001
paper | label smoothing | 0.1
paper | rho | {settings.DEFAULT_RHO} | from a grid search on ResNet-50 for 100 epochs
paper | input size | 224
paper | replicas | {settings.NUM_REPLICAS}
code | augmentation | random resized crop, flip | as torchvision draws it (the logarithm of the ratio is uniform),
  also where no crop fits: the reference code then takes its evaluation crop
code | evaluation | the central 224 / (224 + 32) of the shorter side
code | resizing | bicubic | Pillow's, which smooths where images shrink; TensorFlow's does not, and aligns pixels
  in its own way where images grow
[fine-tuning]
paper | learning rate | b7: 0.016, L2: 0.008 | cosine schedule
paper | weight decay | 1e-05
paper | batch size | b7: 1024, L2: 512
paper | accelerators | b7: 64, L2: 128 | so m is 16 and 4, if each core perturbs for itself
paper | steps | b7: 5,000, L2: 10,000 | L2 'adjusted accordingly': as many examples; epochs follow from the training
  set; choosing rho takes as many steps
paper | input size | L2: 475
code | input size | b7: 600 | CIFAR's images are enlarged to it
paper | batch-norm statistics | the checkpoint's, frozen
paper | last layer | new | on ImageNet the checkpoint's
ours | start of a new last layer | N(0, 0.01^2) | the reference code has U(-1/sqrt(classes), 1/sqrt(classes))
paper | augmentation, CIFAR | AutoAugment | the same policy as from scratch: ours, with a shared Cutout mask
paper | augmentation, other datasets | ImageNet's random crop and flip alone | 'no augmentation' and the preprocessing
  of ImageNet, which in the reference code crops and flips
code | evaluation | the central size / (size + 32) of the shorter side | not on CIFAR
code | resizing | bicubic | Pillow's, which smooths where images shrink; TensorFlow's does not, and aligns pixels
  in its own way where images grow
code | dropout | 0.5 | before the last layer
code | drop-connect | 0.2 | of the last block, rising linearly from 0
ours | rho | {RHOS} | chosen on validation; which one was best for a dataset is not given
ours | epochs without SAM | as with SAM, or twice as many | the paper doubles in Section 3.1 only
ours | label smoothing | 0 | not given
ours | Birdsnap's training set | 47,386 images | the paper names no split
paper | ImageNet | 10 epochs, learning rate 0.1, rho 0.05 | rho is 0.1 in the reference code's example
code | ImageNet | label smoothing 0.1, gradient clipping 1 | of its example
ours | ImageNet without SAM | 10 epochs too | the paper's 15.3 and 11.8 are the errors of the checkpoints
paper | replicas | {settings.NUM_REPLICAS}
[label-noise]
paper | noise, % | {_grid(NOISE_PERCENT)} | labels flipped at random; the test set is clean
ours | a flipped label | is always another class | the paper does not say whether it may be the same
paper | rho | {_rhos(settings.LABEL_NOISE)} | in the order of the noise
paper | rho grid | {RHOS} | on a clean validation set, 10 % of the training set (Table 8)
paper | Mixup's alphas | {_grid(settings.MIXUP_ALPHAS)}
ours | Mixup's alpha | chosen on the validation set | the paper reports the best score; Bootstrap + Mixup has Mixup's
ours | twice the epochs | SGD and Mixup | the paper doubles in Section 3.1 only; never bootstrapped methods
paper | augmentation | basic | as for all of CIFAR-10
ours | replicas | {settings.NUM_REPLICAS} | not given for this table
[landscape]
ours | SGD's model | trained here | the paper's is the checkpoint of Li et al. (2018), shown if its file exists
[hessian]
paper | batch norm | none
ours | start without batch norm | SkipInit, with Fixup's factors | not given
ours | epochs looked at | {_grid(settings.HESSIAN_AT_EPOCHS)} | the paper says '300 steps' next to 'different epochs'
ours | images | 10,000 of 50,000 | not given; the spectrum is of the loss on these
ours | Lanczos | 80 steps, 4 random starts | not given; the 5 largest eigenvalues are computed apart
ours | augmentation | basic | not given
[m-and-rho]
paper | dataset | CIFAR-10 | 'a small ResNet'
ours | m | {_grid(settings.M_GRID)} | not given
ours | rho grid | {RHOS} | the figure's values are not given in the text
[predictive]
paper | models | the two public tasks of Predicting Generalization in Deep Learning (NeurIPS 2020)
paper | measure | mutual information between m-sharpness and the generalization gap
ours | m | {_grid(settings.M_GRID)} | not given
[second-order]
paper | dataset | CIFAR-10
ours | cosine | on one batch, with the L2 term, batch norm's running statistics | not given
[p-norm]
paper | dataset | CIFAR-10 | 'a wide ResNet'; the rest is Table 6's
paper | perturbations | p = 2, p = inf, random of fixed Euclidean norm
ours | rho grid, p = 2 and random | {RHOS} | the figure's values are not given in the text
ours | rho grid, p = inf | rho / sqrt(number of parameters) | not given; as long as for p = 2
[inner-steps]
ours | rho | {_rhos(settings.ASCENT_STEPS)} | on CIFAR-10 and CIFAR-100; not given; Table 6's
ours | model | 'a WideResNet' | WRN-28-10: its errors in Table 1 are near those after one step
paper | ascent steps | {_grid(settings.ASCENT_STEPS_GRID)}
ours | length of an ascent step | rho, then projection onto the ball | not given
paper | replicas | {settings.ASCENT_NUM_RUNS} | mean and standard deviation
[bound]
ours | rho | {RHOS} | the paper gives no value of the bound
ours | delta | 0.05 | not given
ours | noise of the condition | 20 draws, test images | not measured in the paper
""")
REFERENCE_CODE = _BLOCKS["optimizer"] + _BLOCKS["from scratch"]
"""What all training from scratch has that the paper does not say."""

_PROTOCOL, _SMALL_IMAGES = _BLOCKS["protocol"], _BLOCKS["small images"]
AS_TABLE1 = "not given; as for Table 1"
_EXPERIMENTS: Mapping[str, Hyperparameters] = {
    "table1": (*_PROTOCOL, *_tabulated(settings.CIFAR, "Table 6"), *_SMALL_IMAGES),
    "svhn-fashion": (*_PROTOCOL, *_tabulated(settings.SVHN_FASHION, "Table 7"), *_SMALL_IMAGES),
    "imagenet": (),
    "label-noise": settings_of(settings.LABEL_NOISE[20], "rho", given=("model", "epochs", "batch size", "m")),
    "landscape": settings_of(
        settings.LANDSCAPES,
        given=("model",),
        note="not given; rho is the paper's default, m is for 8 accelerators, the rest follows Li et al. (2018)",
    ),
    "hessian": settings_of(
        settings.HESSIAN,
        given=("model", "epochs"),
        note="not given; as for all of CIFAR, with a lower learning rate, as there is no batch norm",
    ),
    "m-and-rho": settings_of(settings.M_SHARPNESS, "rho", "m"),
    "second-order": settings_of(
        settings.SECOND_ORDER,
        given=("model",),
        note="not given; one perturbation for the whole batch, as the lab's second-order terms need it",
    ),
    "p-norm": settings_of(settings.NORMS, "rho", note=AS_TABLE1),
    "inner-steps": settings_of(settings.ASCENT_STEPS["cifar10"], "rho", "model", note=AS_TABLE1),
}
HYPERPARAMETERS = {item: (*own, *_BLOCKS[item], *REFERENCE_CODE) for item, own in _EXPERIMENTS.items()}
HYPERPARAMETERS |= {
    "rho-0.05": HYPERPARAMETERS["table1"],
    "noise-and-rho": HYPERPARAMETERS["label-noise"],
    **dict.fromkeys(("fine-tuning", "fine-tuning-rho-0.05"), _BLOCKS["fine-tuning"] + _BLOCKS["optimizer"]),
    "predictive": _BLOCKS["predictive"],
    "bound": _BLOCKS["bound"],
    "bound-model": settings_of(settings.NORMS, note=AS_TABLE1) + REFERENCE_CODE,
}
"""By item."""
