"""What a study asks of a sweep: models to train, and what to measure of them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flatmin.lab.runs.record import RunRecord
from flatmin.lab.spec.experiment import Experiment
from flatmin.lab.sweeps.measurements import Measurement


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
