"""Where the settings of Foret et al. (2021) come from: the paper, its reference code, or us where neither says.

By item, for the reports: ``sources.txt`` has what `settings` does not.
"""

from collections.abc import Mapping, Sequence
from importlib.resources import files
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


_VALUES = {
    "rho_grid": _grid(settings.RHO_GRID),
    "default_rho": settings.DEFAULT_RHO,
    "replicas": settings.NUM_REPLICAS,
    "noise": _grid(NOISE_PERCENT),
    "noise_rhos": _rhos(settings.LABEL_NOISE),
    "mixup_alphas": _grid(settings.MIXUP_ALPHAS),
    "hessian_epochs": _grid(settings.HESSIAN_AT_EPOCHS),
    "m_grid": _grid(settings.M_GRID),
    "ascent_steps": _grid(settings.ASCENT_STEPS_GRID),
    "ascent_rhos": _rhos(settings.ASCENT_STEPS),
    "ascent_replicas": settings.ASCENT_NUM_RUNS,
}
_BLOCKS = read_blocks(files("flatmin.lab.foret2021").joinpath("sources.txt").read_text().format(**_VALUES))
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
