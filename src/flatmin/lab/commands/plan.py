"""``flatmin reproduce ITEM --plan``: what it would cost, and the commands to run it, without running anything."""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console

from flatmin.lab.commands.console import table
from flatmin.lab.spec.experiment import Data, Experiment, Model
from flatmin.lab.spec.fields import plain
from flatmin.lab.studies.cost import cost, disk_bytes, model_flops, num_models, training_flops
from flatmin.lab.sweeps.jobs import Job

REFERENCE = Experiment(data=Data(name="cifar10"), model=Model(name="wrn-28-10"))
"""The model whose speed describes a device."""
SPEED_COMMAND = (
    "flatmin train --data.name cifar10 --data.augment basic --data.batch-size 256 --model.name wrn-28-10 --epochs 1"
)
UNITS = {"models": 1.0, "image passes (10^6)": 1e6, "PFLOPs": 1e15, "disk (GB)": 1e9}


def print_plan(
    planned: Mapping[str, Iterable[Job]], scale: str, images_per_second: float | None, console: Console
) -> None:
    """Print what the missing runs of each item need, and the commands for one host, several hosts and Ray.

    ``images_per_second`` is how fast one device trains `REFERENCE` without SAM; None if that is not known.
    """
    jobs = {name: list(missing) for name, missing in planned.items()}
    everything = [job for missing in jobs.values() for job in missing]  # items may share runs: they count once
    rows = [(name, *_cells(missing, images_per_second)) for name, missing in jobs.items()]
    if len(rows) > 1:
        rows.append(("together", *_cells(everything, images_per_second)))
    columns = ("item", *UNITS, *(() if images_per_second is None else ("GPU hours",)))
    console.print(table(f"Missing at the scale {scale}", columns, rows))
    if images_per_second is None:
        console.print(f"For GPU hours, measure the speed of one device with\n  {SPEED_COMMAND}\n"
                      "and pass its images/s as --images-per-second.", highlight=False, soft_wrap=True)  # fmt: skip
    else:
        console.print(
            f"GPU hours: training only, at {images_per_second:.0f} images/s for a WRN-28-10 on CIFAR-10, and as many "
            "FLOPs per second for the other models, whatever their size. An upper limit: a run may stop early.",
            highlight=False,
            soft_wrap=True,
        )
    for line in _commands(" ".join(jobs), scale, everything):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def gpu_hours(jobs: Iterable[Job], images_per_second: float) -> float:
    """Return the time of training on one device that trains `REFERENCE` with so many images per second.

    Example:
        >>> one = Experiment(data=Data(name="cifar10", train_size=36), model=REFERENCE.model, epochs=100)
        >>> gpu_hours([Job(experiment=one)], 1.0)
        1.0
    """
    return training_flops(jobs) / (3 * model_flops(REFERENCE) * images_per_second) / 3600


def train_flags(experiment: Experiment) -> list[str]:
    """Return the flags of ``flatmin train`` for an experiment: all fields that are not at their defaults."""
    return list(_flags(plain(experiment, leave_defaults_out=True), ""))


def _flags(tree: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in tree.items():
        name = key.replace("_", "-")
        if isinstance(value, dict):
            yield from _flags(value, f"{prefix}{name}.")
        elif isinstance(value, bool):
            yield f"--{prefix}{'' if value else 'no-'}{name}"
        else:
            yield from (f"--{prefix}{name}", str(value))


def _cells(jobs: list[Job], images_per_second: float | None) -> tuple[str, ...]:
    amounts = (num_models(jobs), cost(jobs), training_flops(jobs), disk_bytes(jobs))
    cells = tuple(_rounded(amount / unit) for amount, unit in zip(amounts, UNITS.values(), strict=True))
    return cells if images_per_second is None else (*cells, _rounded(gpu_hours(jobs, images_per_second)))


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"


def _commands(items: str, scale: str, jobs: list[Job]) -> list[str]:
    reproduce = f"flatmin reproduce {items} --scale {scale}"
    lines = ["", "One host, all its GPUs (or cores):", f"  {reproduce}"]
    lines += ["", "Several hosts with Ray (each needs the datasets):"]
    lines += ["  ray start --head --port 6379                 # on the first host", "  ray start --address HOST1:6379"]
    lines += [f"  {reproduce} --engine ray --address auto"]
    if jobs:
        largest = max(jobs, key=lambda job: training_flops([job]))
        flags = shlex.join(train_flags(largest.experiment))
        lines += ["", "Several hosts, one model (here the most expensive run; the same command on every host):"]
        lines += ["  TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 2 --nproc-per-node 8 --max-restarts 3 \\"]
        lines += ["    --rdzv-backend c10d --rdzv-id flatmin --rdzv-endpoint HOST1:29400 --no-python \\"]
        lines += [f"    flatmin train {flags} --seed {largest.seed} --runs runs/reproduce"]
    return lines
