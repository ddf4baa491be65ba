"""What test_distributed.py starts with torchrun: trains, and in one worker may die on the way."""

import json
import os
import signal
import sys
from pathlib import Path

import torch

from flatmin.lab.spec.experiment import Experiment
from flatmin.lab.training.engine import train
from flatmin.lab.training.steps import Stepper


def main(spec, runs, die_at):
    torch.set_num_threads(1)
    seen = []
    step = Stepper.step

    def recorded_step(self, batch, number, lr):
        first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if number == die_at and first_life and self.workers.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        seen.append((number, batch.examples.tolist()))
        return step(self, batch, number, lr)

    Stepper.step = recorded_step
    train(Experiment.from_json(spec.read_text()), runs=runs, checkpoint_seconds=0)
    (runs / f"seen-{os.environ['RANK']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
