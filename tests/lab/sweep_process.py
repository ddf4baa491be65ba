"""A sweep in a process of its own, to be killed: python sweep_process.py RUNS NUM_JOBS EPOCHS [ENGINE]."""

import sys
from pathlib import Path

from rich.console import Console

from flatmin.lab.engine import InterruptedRun
from flatmin.lab.jobs import Job, Measurement
from flatmin.lab.spec import Data, Experiment, Model, Optim
from flatmin.lab.sweep import sweep

SHARPNESS = Measurement(kind="sharpness", settings=(("num_examples", 20),))


def tiny(lr=0.1, rho=0.0, epochs=1, **data):
    return Experiment(
        data=Data(**{"train_size": 40, "batch_size": 20} | data),
        model=Model(name="cnn-2"),
        optim=Optim(lr=lr, rho=rho),
        epochs=epochs,
        precision="float32",
    )


def many_jobs(count, epochs):
    """Replicas of four experiments."""
    experiments = [tiny(lr=lr, rho=rho, epochs=epochs) for lr in (0.05, 0.1) for rho in (0.0, 0.1)]
    return [Job(experiment=experiments[i % 4], seed=i // 4) for i in range(count)]


if __name__ == "__main__":
    try:
        found = sweep(
            many_jobs(int(sys.argv[2]), int(sys.argv[3])),
            runs=Path(sys.argv[1]),
            processes=2,
            checkpoint_seconds=0.05,
            console=Console(),
            engine=sys.argv[4] if len(sys.argv) > 4 else "local",
        )
        sys.exit(0 if all(outcome.complete for outcome in found) else 1)
    except InterruptedRun as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(128 + stopped.signal_number)
