"""Between two points where the engine looks at the loss, nothing waits for the device."""

import dataclasses

import pytest
import torch

from device_sync import NoDeviceSync
from flatmin.lab.runs.directory import RunDirectory
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.training import steps
from flatmin.lab.training.distributed import Workers
from flatmin.lab.training.run import Run
from flatmin.lab.training.session import Interruption
from sweep_process import AtStep

META = torch.device("meta")  # holds no data: whoever looks at a value fails


class EnoughError(Exception):
    """Ends a run without an evaluation."""


def enough():
    raise EnoughError


class HostGenerator(torch.Generator):
    """There is none for "meta"."""

    def __new__(cls, *_):
        return super().__new__(cls)


MIXED = {"augment": "cutout", "mixup": 0.5}


@pytest.mark.parametrize(
    ("changes", "data"),
    [
        ({"rho": 0.0}, MIXED),
        ({"rho": 0.0, "m": 5}, MIXED),
        *(({"rho": 0.1}, data) for data in (MIXED, {"augment": "basic"}, {"augment": "autoaugment"})),
        ({"rho": 0.1, "m": 5, "clip_norm": 1.0}, MIXED),
        ({"rho": 0.1, "adaptive": 0.01, "decay": "loss"}, MIXED),
        ({"rho": 0.1, "ascent_steps": 2}, MIXED),
        ({"rho": 0.1, "direction": "random"}, MIXED),
    ],
    ids=str,
)
def test_the_loop_does_not_wait_for_the_device(changes, data, tmp_path, monkeypatch):
    experiment = Experiment(
        data=Data(train_size=80, batch_size=20, **data),
        model=Model(name="wrn-10-1"),
        optim=dataclasses.replace(Optim(), **changes),
        epochs=2,
        precision="float32",
    )
    monkeypatch.setattr(steps.torch, "Generator", HostGenerator)
    directory = RunDirectory(experiment, 0, tmp_path)
    directory.path.mkdir()
    run = Run(directory, Workers(device=META), None)
    run.attention_steps = 1000
    with NoDeviceSync(), pytest.raises(EnoughError):
        run.run_epochs(AtStep(3, enough), Interruption(), 60.0)
