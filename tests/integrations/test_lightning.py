"""SAM as a callback of Lightning, against plain loops with SAM."""

import copy
import os
import socket
import subprocess
import sys
from pathlib import Path

import lightning_cases
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from flatmin import SAM
from flatmin.integrations.lightning import SAMCallback

pytestmark = pytest.mark.filterwarnings(r"ignore:.*(LeafSpec|torch\.jit|pin_memory).*")

loss_fn = nn.functional.cross_entropy


def difference(a, b):
    return max((s - t).abs().max().item() for s, t in zip(a.values(), b.values(), strict=True))


def plain_loop(rho=0.1, part=1.0, clip=None, num_epochs=2, **settings):
    """Return the state of the network after the same steps in a plain loop, and the losses at w."""
    net = lightning_cases.Classifier().net
    opt = SAM(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), rho=rho, model=net, **settings)
    if clip is not None:
        opt.base.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(net.parameters(), clip) and None)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    losses = []
    for _ in range(num_epochs):
        for batch in lightning_cases.make_data():
            loss = opt.step_batch(lambda x, y: loss_fn(net(x), y), batch, part=part)
            losses.append(loss)
        schedule.step()
    return net.state_dict(), torch.stack(losses)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"part": 0.25},
        {"weight": 2.0},
        {"weight": 1.0, "part": 0.5},
        {"ascent_steps": 2},
        {"adaptive": True},
        {"p": 1.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("clip", [None, 0.1])
def test_trains_as_a_plain_loop_does(settings, clip):
    callback = SAMCallback(rho=0.1, **settings)
    model, _ = lightning_cases.fit(callback, gradient_clip_val=clip)
    expected, _ = plain_loop(clip=clip, **settings)
    assert difference(model.net.state_dict(), expected) < 1e-6
    without, _ = plain_loop(rho=0.0, clip=clip)
    assert difference(without, expected) > 1e-4  # so that a callback that does nothing would be seen


def test_values_are_logged_once_and_at_w():
    _, trainer = lightning_cases.fit(SAMCallback(rho=0.1), max_epochs=1)
    _, losses = plain_loop(num_epochs=1)
    assert trainer.callback_metrics["loss"] == pytest.approx(losses.mean().item(), abs=1e-6)
    sam = trainer.optimizers[0]
    assert trainer.callback_metrics["sharpness"] == sam.metrics.sharpness > 0
    assert trainer.callback_metrics["grad_norm"] == sam.metrics.grad_norm > 0
    _, trainer = lightning_cases.fit(SAMCallback(rho=0.1, log=False), max_epochs=1)
    assert set(trainer.callback_metrics) == {"loss"}


@pytest.mark.parametrize("settings", [{}, {"part": 0.5}, {"direction": "random"}], ids=str)
def test_a_resumed_run_ends_with_the_same_weights(settings, tmp_path):
    whole, _ = lightning_cases.fit(SAMCallback(rho=0.1, **settings), max_epochs=4)
    _, trainer = lightning_cases.fit(SAMCallback(rho=0.1, **settings), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    torch.manual_seed(5)
    resumed, _ = lightning_cases.fit(
        SAMCallback(rho=0.1, **settings), max_epochs=4, ckpt_path=str(tmp_path / "run.ckpt")
    )
    assert difference(whole.state_dict(), resumed.state_dict()) == 0


def test_float16_with_a_scaler():
    """The scale cancels out: for the first pass in the direction, for the second one by unscaling, before clipping."""
    plugin = MixedPrecision("16-mixed", "cpu")  # Lightning's own choice for a CPU would be bfloat16
    model, trainer = lightning_cases.fit(SAMCallback(rho=0.1), plugins=[plugin], gradient_clip_val=0.1)
    assert trainer.precision_plugin.scaler.get_scale() > 1
    assert difference(model.net.state_dict(), plain_loop(clip=0.1)[0]) < 2e-3
    assert difference(model.net.state_dict(), plain_loop(clip=0.1, rho=0.0)[0]) > 4e-3


def test_bfloat16():
    model, _ = lightning_cases.fit(SAMCallback(rho=0.1), precision="bf16-mixed")
    assert difference(model.net.state_dict(), plain_loop()[0]) < 2e-2


def test_manual_optimization_gets_wrapped_optimizers():
    class Manual(lightning_cases.Classifier):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            opt = self.optimizers()
            opt.zero_grad()
            self.manual_backward(loss_fn(self.net(batch[0]), batch[1]))
            with opt.perturbed():
                self.manual_backward(loss_fn(self.net(batch[0]), batch[1]))
            opt.step()

        def on_train_epoch_end(self):
            self.lr_schedulers().step()

    model, _ = lightning_cases.fit(SAMCallback(rho=0.1), Manual())
    assert difference(model.net.state_dict(), plain_loop()[0]) < 1e-6
    with pytest.raises(ValueError, match="part=0.5 needs automatic optimization"):
        lightning_cases.fit(SAMCallback(rho=0.1, part=0.5), Manual())


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"rho": -1.0}, ValueError, "rho"),
        ({"part": 0}, ValueError, r"part must be a number in \(0, 1\], got 0"),
        ({"part": 2.0}, ValueError, "part must be"),
        ({"weight": -1.0}, ValueError, "weight"),
        ({"radius": 0.1}, TypeError, "radius"),
        ({"model": None}, TypeError, "Leave `model`"),
    ],
)
def test_wrong_settings_raise_at_once(settings, error, message):
    with pytest.raises(error, match=message):
        SAMCallback(**settings)


def test_what_cannot_be_sam_is_named():
    with pytest.raises(ValueError, match="accumulate_grad_batches=2 is not SAM"):
        lightning_cases.fit(SAMCallback(), accumulate_grad_batches=2)
    made = lightning_cases.Classifier(lambda params: SAM(torch.optim.SGD(params, lr=0.1)))
    with pytest.raises(TypeError, match="SAM already"):
        lightning_cases.fit(SAMCallback(), made)
    assert "training_step" not in made.__dict__


def test_the_module_gets_its_methods_back():
    model, _ = lightning_cases.fit(SAMCallback(rho=0.1))
    assert not {"training_step", "optimizer_step", "log"} & model.__dict__.keys()

    class Failing(lightning_cases.Classifier):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("on purpose")

    failing = Failing()
    with pytest.raises(RuntimeError, match="on purpose"):
        lightning_cases.fit(SAMCallback(rho=0.1), failing)
    assert not {"training_step", "optimizer_step", "log"} & failing.__dict__.keys()


def test_ddp(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = "import sys, lightning_cases; lightning_cases.main(sys.argv[1])"
    (tmp_path / "script.py").write_text(f"import flatmin.lab.data.torchvision_operators\n{script}\n")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}"]
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [*launcher, str(tmp_path / "script.py"), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    # Statistics of batch norm are those of the first worker.
    data = [list(lightning_cases.make_data(sampler=range(rank, 24, 2))) for rank in range(2)]
    for name, part in {"whole": 1.0, "part": 0.5}.items():
        net = lightning_cases.Classifier().net
        base = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for batches in zip(*data, strict=True):
            workers = [copy.deepcopy(net) for _ in batches]
            for worker, batch in zip(workers, batches, strict=True):
                sam = SAM(torch.optim.SGD(worker.parameters(), lr=0.0), rho=0.1, model=worker)
                sam.step_batch(lambda x, y: loss_fn(worker(x), y), batch, part=part)
            net.load_state_dict(workers[0].state_dict())
            for p, q, r in zip(net.parameters(), *(worker.parameters() for worker in workers), strict=True):
                p.grad = (q.grad + r.grad) / 2
            base.step()
        assert difference(torch.load(tmp_path / f"{name}.pt"), net.state_dict()) < 1e-6, name
    whole, shared = torch.load(tmp_path / "whole.pt"), torch.load(tmp_path / "shared.pt")
    assert difference(whole, shared) > 1e-5
