"""SAM as a callback of Lightning, compared with plain loops."""

import copy
import math
import warnings
from collections import defaultdict

import lightning.pytorch as pl
import lightning_cases
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.amp import GradScaler

from flatmin import SAM, suggest_rho
from flatmin.integrations.lightning import SAMCallback
from two_processes import as_under_torchrun

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
    ("settings", "clip"),
    [
        *(({}, clip) for clip in (None, 0.1)),
        *(({"part": 0.25}, clip) for clip in (None, 0.1)),
        ({"weight": 1.0, "part": 0.5}, None),
        ({"ascent_steps": 2, "adaptive": True, "p": math.inf}, 0.1),
        ({"weight": 2.0}, 0.1),
    ],
    ids=str,
)
def test_trains_as_a_plain_loop_does(settings, clip):
    callback = SAMCallback(rho=0.1, **settings)
    model, _ = lightning_cases.fit(callback, gradient_clip_val=clip)
    expected, _ = plain_loop(clip=clip, **settings)
    assert difference(model.net.state_dict(), expected) < 1e-6
    without, _ = plain_loop(rho=0.0, clip=clip)
    assert difference(without, expected) > 1e-4  # a callback that does nothing would be seen


def two_optimizers(parameters):
    parameters = list(parameters)
    matrices, others = ([p for p in parameters if (p.ndim == 2) == is_matrix] for is_matrix in (True, False))
    return SAM([torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.01)], rho=0.1)


def test_a_module_may_return_sam_around_two_optimizers():
    """The callback wraps one optimizer, as Lightning's automatic optimization has one; SAM itself is one too."""
    model, trainer = lightning_cases.fit([], lightning_cases.Classifier(two_optimizers))
    net = lightning_cases.Classifier().net
    opt = two_optimizers(net.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    for _ in range(2):
        for x, y in lightning_cases.make_data():

            def closure(x=x, y=y):
                opt.zero_grad()
                loss = loss_fn(net(x), y)
                loss.backward()
                return loss

            opt.step(closure)
        schedule.step()
    assert difference(dict(model.net.named_parameters()), dict(net.named_parameters())) < 1e-6
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == pytest.approx([0.025, 0.0025])


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
    for settings, name in (({"part": 0.5}, "part=0.5"), ({"rho": "auto"}, 'rho="auto"')):
        with pytest.raises(ValueError, match=f"{name} needs automatic optimization"):
            lightning_cases.fit(SAMCallback(**settings), Manual())


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"rho": -1.0}, ValueError, "rho"),
        ({"part": 0}, ValueError, r"part must be a number in \(0, 1\], got 0"),
        ({"part": 2.0}, ValueError, "part must be"),
        ({"weight": -1.0}, ValueError, "weight"),
        ({"radius": 0.1}, TypeError, "radius"),
        ({"model": None}, TypeError, "Leave `model`"),
        ({"rho": "auto", "direction": "random"}, ValueError, "follows the gradient"),
        ({"rho": "large"}, TypeError, "rho"),
    ],
)
def test_wrong_settings_raise_at_once(settings, error, message):
    with pytest.raises(error, match=message):
        SAMCallback(**settings)


def test_what_cannot_be_sam_is_named():
    with pytest.raises(ValueError, match="accumulate_grad_batches=2 does not work with SAM"):
        lightning_cases.fit(SAMCallback(), accumulate_grad_batches=2)
    scheduler = GradientAccumulationScheduler({0: 1, 3: 2})
    with pytest.raises(ValueError, match=r"GradientAccumulationScheduler\(\{0: 1, 3: 2\}\) does not work with SAM"):
        lightning_cases.fit([SAMCallback(), scheduler])
    made = lightning_cases.Classifier(lambda params: SAM(torch.optim.SGD(params, lr=0.1)))
    with pytest.raises(TypeError, match="SAM already"):
        lightning_cases.fit(SAMCallback(), made)
    assert "training_step" not in made.__dict__


class Unadapted(lightning_cases.Classifier):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        opt.zero_grad()
        self.manual_backward(loss_fn(self.net(batch[0]), batch[1]))
        opt.step()


def test_manual_optimization_with_one_pass_is_told_what_to_write():
    with pytest.raises(TypeError, match="within `with opt.perturbed"):
        lightning_cases.fit(SAMCallback(rho=0.1), Unadapted())
    lightning_cases.fit(SAMCallback(rho=0.0), Unadapted())


class Recording(lightning_cases.Classifier):
    """Keeps records in every way that people do, and a state that the next batch begins with."""

    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        self.labels, self.by_kind, self.num_examples, self.carried = [], defaultdict(list), 0, torch.zeros(())
        self.outputs = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x + 0.1 * self.carried)
        self.carried = self.carried + x.mean()
        self.accuracy(logits, y)
        self.labels.append(y)
        self.by_kind["x"].append(x)
        self.num_examples += len(x)
        loss = loss_fn(logits, y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return {"loss": loss, "logits": logits.detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.outputs.append(outputs)


@pytest.mark.parametrize(
    "settings",
    [{}, {"part": 0.5}, {"ascent_steps": 2}, {"direction": "momentum"}, {"direction": "random", "weight": 1.0}],
    ids=str,
)
def test_a_module_records_every_example_once_and_at_w(settings):
    """With lr = 0 the records are the same as in plain training; part and rest are recorded apart."""

    def no_step(params):
        return torch.optim.SGD(params, lr=0.0, momentum=0.9)

    def fit(rho):
        module = Recording()
        module.make_optimizer = no_step
        module.net[1] = nn.Identity()  # batch norm would see part and rest apart
        _, trainer = lightning_cases.fit(SAMCallback(rho=rho, **settings), module, max_epochs=1)
        return module, trainer

    plain, plain_trainer = fit(0.0)
    module, trainer = fit(1e-3)
    assert module.num_examples == plain.num_examples == 24
    assert torch.equal(torch.cat(module.labels), torch.cat(plain.labels))
    assert torch.equal(torch.cat(module.by_kind["x"]), torch.cat(plain.by_kind["x"]))
    assert "loss" in trainer.callback_metrics
    if "part" in settings:
        assert [len(y) for y in module.labels] == 6 * [4]
        return
    assert module.accuracy._update_count == 3
    assert torch.equal(module.carried, plain.carried)
    exact = settings.get("direction") is None
    for a, b in zip(module.outputs, plain.outputs, strict=True):
        assert difference(a, b) <= (0 if exact else 0.1)
    assert module.accuracy.compute() == plain.accuracy.compute()
    if exact:
        assert trainer.callback_metrics["loss"] == plain_trainer.callback_metrics["loss"]


class Distilling(lightning_cases.Classifier):
    """Moves a teacher and fills a queue inside ``training_step``, as many modules for self-supervised learning do."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(4, 3))
        self.make_optimizer = lambda _: torch.optim.SGD(self.net.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            for p, q in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                p.lerp_(q, 0.5)
            targets = self.teacher(batch[0])
        outputs = self.net(batch[0])
        loss = (outputs - targets).square().mean() + (outputs @ self.queue.clone().T).square().mean()
        self.queue.copy_(torch.cat([targets[:2], self.queue[:2]]))
        return loss + loss_fn(outputs, batch[1])


def test_teachers_and_queues_move_once_per_step():
    """With a tiny radius they move as in plain training, and the loss at w + eps is the loss at w."""
    modules = {}
    for rho in (0.0, 1e-7):
        modules[rho], trainer = lightning_cases.fit(SAMCallback(rho=rho), Distilling(), max_epochs=1)
    assert abs(trainer.optimizers[0].metrics.sharpness) < 1e-5
    assert difference(modules[0.0].state_dict(), modules[1e-7].state_dict()) < 1e-5


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("perturbed", [False, True])
def test_training_step_that_returns_none_skips_the_batch(perturbed, clip):
    """Whether it does so at w or, as after a loss that is not finite, at w + eps."""

    class Skipping(lightning_cases.Classifier):
        def training_step(self, batch, batch_idx):
            skip = batch_idx == 1 and self.optimizers().is_perturbed == perturbed
            before.append(self.net[0].weight.clone())
            return None if skip else super().training_step(batch, batch_idx)

    before = []
    model, trainer = lightning_cases.fit(SAMCallback(rho=0.1), Skipping(), max_epochs=1, gradient_clip_val=clip)
    assert trainer.global_step == 3
    assert len(before) == (6 if perturbed else 5)
    assert torch.equal(before[2], before[-2])  # at w, before the batch and after it
    expected = lightning_cases.Classifier()
    opt = SAM(torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9), rho=0.1, model=expected)
    if clip is not None:
        opt.base.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(expected.parameters(), clip) and None)
    for i, (x, y) in enumerate(lightning_cases.make_data()):
        if i != 1:
            opt.step_batch(lambda x, y: loss_fn(expected.net(x), y), (x, y))
    assert difference(dict(model.named_parameters()), dict(expected.named_parameters())) < 1e-6


@pytest.mark.parametrize("part", [1.0, 0.25])
def test_auto_finds_the_radius_on_the_first_eight_batches(part, tmp_path):
    """With lr = 0 it is the suggestion for these batches; measuring changes nothing else."""

    def fit(rho, **settings):
        module = lightning_cases.Classifier(lambda params: torch.optim.SGD(params, lr=0.0))
        return lightning_cases.fit(SAMCallback(rho=rho, part=part), module, **settings)

    module, trainer = fit("auto", max_epochs=4)
    net = lightning_cases.Classifier().net
    batches = [[b[: round(part * 8)] for b in batch] for _ in range(3) for batch in lightning_cases.make_data()][:8]
    opt = SAM(torch.optim.SGD(net.parameters(), lr=0.1), model=net)
    suggestion = suggest_rho(opt, lambda x, y: loss_fn(net(x), y), batches)
    assert trainer.callback_metrics["rho"].item() == pytest.approx(suggestion.rho, rel=1e-5)
    given, other = fit(trainer.optimizers[0].rho, max_epochs=4)
    assert difference(module.state_dict(), given.state_dict()) == 0
    assert trainer.callback_metrics["loss"] == other.callback_metrics["loss"]
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    _, resumed = fit("auto", max_epochs=5, ckpt_path=str(tmp_path / "run.ckpt"))
    assert resumed.optimizers[0].rho == trainer.optimizers[0].rho


def test_auto_under_a_gradient_scaler():
    """The scale cancels out. The first one overflows: that step is skipped, and not measured."""
    radii = []
    for settings in ({}, {"plugins": [MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=2.0**30))]}):
        module = lightning_cases.Classifier(lambda params: torch.optim.SGD(params, lr=0.0))
        _, trainer = lightning_cases.fit(SAMCallback(rho="auto"), module, max_epochs=12, **settings)
        radii.append(trainer.optimizers[0].rho)
    assert trainer.precision_plugin.scaler.get_scale() < 2**30
    assert radii[1] == pytest.approx(radii[0], rel=0.02)


class Noisy(lightning_cases.Classifier):
    """Draws from a generator of its own, which SAM does not replay."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def training_step(self, batch, batch_idx):
        noise = torch.randn(batch[0].shape, generator=self.generator)
        return super().training_step([batch[0] + noise, batch[1]], batch_idx)


def test_check_names_what_cannot_be_repeated():
    with pytest.raises(ValueError, match=r"generator: a generator of its own"):
        lightning_cases.fit(SAMCallback(rho=0.1, check=True), Noisy())
    with pytest.raises(ValueError, match="check=True needs automatic optimization"):
        lightning_cases.fit(SAMCallback(check=True), Unadapted())


@pytest.mark.parametrize("module", [lightning_cases.Classifier, Recording, Distilling])
def test_check_accepts_what_can_be_repeated_and_changes_nothing(module):
    plain, _ = lightning_cases.fit(SAMCallback(rho=0.1), module(), max_epochs=1)
    checked, trainer = lightning_cases.fit(SAMCallback(rho=0.1, check=True), module(), max_epochs=1)
    assert difference(plain.state_dict(), checked.state_dict()) == 0
    assert trainer.global_step == 3


def test_a_checkpoint_with_another_radius_is_reported(tmp_path):
    _, trainer = lightning_cases.fit(SAMCallback(rho=0.2), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    data, model = lightning_cases.make_data(), lightning_cases.Classifier()
    trainer = pl.Trainer(callbacks=[SAMCallback(rho=0.1)], max_epochs=2, **lightning_cases.SETTINGS)
    warnings.filterwarnings("ignore", message=".*(workers|logging interval|_pytree|checkpoint directory).*")
    with pytest.warns(UserWarning, match="rho=0.2, which replaces rho=0.1"):
        trainer.fit(model, data, ckpt_path=str(tmp_path / "run.ckpt"))
    assert trainer.optimizers[0].rho == 0.2


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


def test_ddp(two_processes, tmp_path):
    two_processes.run(as_under_torchrun, lightning_cases.fit_with_ddp, tmp_path)
    # Statistics of batch norm are the first worker's.
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
