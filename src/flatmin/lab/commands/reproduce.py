"""``flatmin reproduce`` runs what tables and figures need; with ``--plan`` it only says what that costs."""

import difflib
import math
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from flatmin.lab.commands.console import table
from flatmin.lab.commands.report import ITEMS, items_named, print_verdicts, write_page
from flatmin.lab.errors import DataError, ModelError, SpecError
from flatmin.lab.runs.record import Records, read_records
from flatmin.lab.spec.experiment import Data, Experiment, Model
from flatmin.lab.spec.fields import plain
from flatmin.lab.studies.cost import cost, disk_bytes, model_flops, num_models, training_flops
from flatmin.lab.studies.registered_plan import PLAN_FILE, Change, plan_of, read_plan, register
from flatmin.lab.studies.study import Item, Scale, describe, is_meant, missing_jobs, planned_jobs, run_study
from flatmin.lab.sweeps.jobs import Job, missing_inputs
from flatmin.lab.sweeps.sweep import Sweeper, SweepSettings

SHOWN_NAMES = 5
REFERENCE = Experiment(data=Data(name="cifar10"), model=Model(name="wrn-28-10"))
"""The model whose speed describes a device."""
SPEED_COMMAND = (
    "flatmin train --data.name cifar10 --data.augment basic --data.batch-size 256 --model.name wrn-28-10 --epochs 1"
)
UNITS = {"models": 1.0, "image passes (10^6)": 1e6, "PFLOPs": 1e15, "disk (GB)": 1e9}


@dataclass(kw_only=True)
class Reproduce(SweepSettings):
    """Reproduce tables and figures of the paper, and write a page: the paper's numbers next to the measured ones."""

    items: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Names of tables and figures (`flatmin list items`), or all (on a laptop: a day)."""
    scale: Scale = "laptop"
    """paper: its own settings (GPUs and data needed); laptop: small models, real data, two cores; smoke: seconds."""
    runs: Path = Path("runs/reproduce")
    """The directory of all runs; finished ones are not repeated, interrupted ones resume."""
    out: Path | None = None
    """Where the page goes; RUNS/report-SCALE if None."""
    only: tuple[str, ...] = ()
    """Run only what has one of these texts in its name (table1/wrn-10-2/none, landscape/SAM/seed0); read the rest."""
    plan: bool = False
    """Run nothing: print how many models, image passes, FLOPs, GPU hours and bytes it takes, and the commands."""
    images_per_second: float | None = None
    """For --plan: how many images one device trains per second, for a WRN-28-10 on CIFAR-10 without SAM."""
    write: Path | None = None
    """For --plan: register the plan in this directory (plan.json); commit it before the first run."""
    what: str = ""
    """For --write, if a registered plan changes: what changes."""
    why: str = ""
    """... and why."""
    known: str = ""
    """... and what is known of the results by then."""
    collected: tuple[Path, ...] = ()
    """Runs that are in one of these RESULTS/runs.jsonl (`flatmin collect`) are not repeated."""

    def run(self, console: Console) -> None:
        """Run the items, one after the other, and write the page on all of them."""
        if not self.items:
            raise SpecError(f"Which table or figure? There are {', '.join(ITEMS)}, and all.")
        speed = self.images_per_second
        if speed is not None and not (self.plan and 0 < speed < math.inf):
            raise SpecError(f"--images-per-second must be positive, and goes with --plan; got {speed}.")
        if self.write is not None and not self.plan:
            raise SpecError(f"--write {self.write} goes with --plan: nothing is run while a plan is registered.")
        chosen, known = items_named(self.items), self._records()
        plans = {item.name: planned_jobs(item, self.scale, known).values() for item in chosen}
        missing = {name: missing_jobs(jobs, known, self.only) for name, jobs in plans.items()}
        if self.plan:
            print_plan(missing, self.scale, speed, console)
            if self.write is not None:
                self._register(chosen, self.write, console)
            return
        self._check_only([job for jobs in plans.values() for job in jobs])
        # Before the first item begins, because that may take hours. The nodes of a cluster have their own files.
        problems = {} if self.engine == "ray" else missing_inputs(missing, self.data_root)
        skipped = {name: type(errors[0])("\n".join(map(str, errors))) for name, errors in problems.items() if errors}
        _raise_if_none_is_left(chosen, skipped)
        for name, why in skipped.items():
            console.print(f"{name} is left out: {why}", highlight=False, markup=False)
        shown: list[Item] = []
        num_run = 0
        try:
            settings = {field.name: getattr(self, field.name) for field in fields(SweepSettings)}
            with Sweeper(**settings, console=console) as sweeper:
                for item in (item for item in chosen if item.name not in skipped):
                    console.print(f"{item.source}: {item.title} ({item.name}, {self.scale})", style="bold")
                    shown.append(item)
                    try:
                        num_run += run_study(item, self.scale, known, sweeper.run, self.only)
                    except (DataError, ModelError) as error:  # found, but corrupt: the other items may not need it
                        shown.pop()
                        skipped[item.name] = error
                        _raise_if_none_is_left(chosen, skipped)
                        console.print(f"{item.name} is left out: {error}", highlight=False, markup=False)
                        continue
                    print_verdicts(describe(item, self.scale, known), console)
        except Exception:
            known = self._records()  # with what the last sweep has finished
            raise
        finally:
            if shown:
                found = [describe(item, self.scale, known) for item in shown]
                page = write_page(found, known, self.out or self.runs / f"report-{self.scale}")
                console.print(f"The page: {page}")
        if self.only and not num_run and not skipped and any(missing.values()):
            raise SpecError(self._what_comes_first(chosen, known))
        if skipped:
            reasons = "\n".join(dict.fromkeys(map(str, skipped.values())))
            raise DataError(f"What {', '.join(skipped)} needed was not there; all else was run.\n{reasons}")

    def _records(self) -> Records:
        known = Records(self.runs)
        for results in self.collected:
            known |= {name: r for name, r in read_records(results).items() if known[name].state == "missing"}
        return known

    def _register(self, items: Sequence[Item], results: Path, console: Console) -> None:
        registered, _ = read_plan(results)
        plans = {item.name: plan_of(item, self.scale) for item in items}
        changes = [
            Change(item=name, date=time.strftime("%Y-%m-%d"), what=self.what, why=self.why, known=self.known)
            for name, plan in plans.items()
            if registered.get(name, plan) != plan and self.what and self.why and self.known
        ]
        written = register(results, plans, changes)
        console.print(f"Registered in {results / PLAN_FILE}: {', '.join(written) or 'nothing new'}.")

    def _check_only(self, jobs: Sequence[Job]) -> None:
        """Raise a SpecError if ``only`` means no run of any item."""
        if not any(is_meant(job, self.only) for job in jobs) and self.only:
            names = list(dict.fromkeys(job.experiment.name.removesuffix(" (choosing)") for job in jobs))
            close = difflib.get_close_matches(self.only[0], names, n=SHOWN_NAMES, cutoff=0.5) or names[:SHOWN_NAMES]
            raise SpecError(
                f"--only {' '.join(self.only)}: no run has that in its name. There are {len(names)} names, for "
                f"example {', '.join(close)}."
            )

    def _what_comes_first(self, chosen: Sequence[Item], known: Records) -> str:
        """Return why nothing was run though ``only`` means some runs: their settings are to be chosen by others."""
        jobs = [job for item in chosen for job in planned_jobs(item, self.scale, known).values()]
        missing = missing_jobs(jobs, known)
        conditions = {job.experiment.name.rpartition("/")[0] for job in missing if is_meant(job, self.only)}
        names = dict.fromkeys(job.experiment.name for job in missing if not is_meant(job, self.only))
        first = [
            name.removesuffix(" (choosing)")
            for name in names
            if name.endswith(" (choosing)") and name.rpartition("/")[0] in conditions
        ]
        return (
            f"--only {' '.join(self.only)}: nothing was run, because the settings of these runs follow from a choice "
            f"among others. Name those too, or first: {', '.join(first[:SHOWN_NAMES])}."
        )


def _raise_if_none_is_left(chosen: Sequence[Item], skipped: dict[str, Exception]) -> None:
    """Raise the one error there is, or all of them as one, where no item can be run."""
    if chosen and len(skipped) == len(chosen):
        first, *others = skipped.values()
        lines = dict.fromkeys(line for error in skipped.values() for line in str(error).splitlines())
        raise DataError("\n".join(lines)) if others else first


def print_plan(jobs: Mapping[str, list[Job]], scale: str, images_per_second: float | None, console: Console) -> None:
    """Print what the missing runs of each item need, and the commands for one host, several hosts and Ray.

    ``images_per_second`` is how fast one device trains `REFERENCE` without SAM; None if that is not known.
    """
    everything = [job for missing in jobs.values() for job in missing]  # items may share runs: they count once
    rows = [(name, *_cells(missing, images_per_second)) for name, missing in jobs.items()]
    if len(rows) > 1:
        rows.append(("together", *_cells(everything, images_per_second)))
    columns = ("item", *UNITS, *(() if images_per_second is None else ("GPU hours",)))
    console.print(table(f"Missing at the scale {scale}", columns, rows))
    note = (
        f"For GPU hours, measure the speed of one device with\n  {SPEED_COMMAND}\nand pass its images/s as "
        "--images-per-second."
        if images_per_second is None
        else f"GPU hours: training only, at {images_per_second:.0f} images/s for a WRN-28-10 on CIFAR-10, and as many "
        "FLOPs per second for the other models, whatever their size. An upper limit: a run may stop early."
    )
    for line in (note, *_commands(" ".join(jobs), scale, everything)):
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
