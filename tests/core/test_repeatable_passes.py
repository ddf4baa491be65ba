"""Both passes start from the same buffers, teachers and generators, and the first pass decides what is left of them."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import references
from flatmin import SAM, sam_gradient

WAYS = ["closure", "ascent steps", "list", "two passes", "accumulated", "parts", "plain step_batch"]


class Queue(nn.Module):
    """MoCo's: the keys of past batches enter the loss, and this batch's are added."""

    def __init__(self, in_place=True):
        super().__init__()
        self.encoder = nn.Linear(4, 3)
        self.register_buffer("queue", torch.randn(8, 3))
        self.in_place = in_place

    def forward(self, x):
        z = self.encoder(x)
        loss = torch.logsumexp(z @ self.queue.T, 1).mean() + z.square().mean()
        new = torch.cat([z.detach(), self.queue])[:8]
        if self.in_place:
            self.queue.data.copy_(new)  # which no version counter sees
        else:
            self.queue = new
        return loss


class Teacher(nn.Module):
    """An exponential moving average of the student, updated in the training step."""

    def __init__(self, update="data"):
        super().__init__()
        self.student = nn.Linear(4, 3)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        nn.init.normal_(self.teacher.weight)
        self.update = update

    def forward(self, x):
        for mean, p in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            if self.update == "data":
                mean.data = 0.5 * mean.data + 0.5 * p.data
            elif self.update == "in place":
                mean.data.mul_(0.5).add_(p.data, alpha=0.5)
            else:
                with torch.no_grad():
                    mean.lerp_(p, 0.5)
        return (self.student(x) - self.teacher(x.flip(0))).square().mean() + self.student(x).square().mean()


class SpectralNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))

    def forward(self, x):
        return self.layer(x).square().mean()


class Noise(nn.Module):
    def __init__(self, source):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.source = source

    def forward(self, x):
        noise = {
            "torch": lambda: torch.randn(3),
            "numpy": lambda: torch.tensor(np.random.rand(3), dtype=torch.float32),  # noqa: NPY002
            "one normal of numpy": lambda: torch.full((3,), np.random.randn()),  # noqa: NPY002
            "python": lambda: torch.tensor([random.random() for _ in range(3)]),
        }[self.source]()
        return (self.layer(x) * noise).square().mean()


MODELS = {
    "queue": Queue,
    "assigned queue": lambda: Queue(in_place=False),
    "teacher": Teacher,
    "teacher in place": lambda: Teacher("in place"),
    "teacher by lerp": lambda: Teacher("lerp"),
    "spectral norm": SpectralNorm,
    "torch": lambda: Noise("torch"),
    "numpy": lambda: Noise("numpy"),
    "one normal of numpy": lambda: Noise("one normal of numpy"),
    "python": lambda: Noise("python"),
}


class PseudoLabels(nn.Module):
    """FixMatch's: the targets are of the model in eval mode, where batch norm reads the statistics that it moves."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=0.5))

    def forward(self, x):
        return self.net(x)


def pseudo_label_loss(model, x):
    model.eval()
    with torch.no_grad():
        target = model(x)
    model.train()
    return (model(x) - target).square().mean()


@pytest.mark.parametrize("form", ["closure", "block"])
def test_statistics_that_a_pass_reads_in_eval_mode_are_the_same_in_both(form):
    """From the second step on: the first one tells that the model is called in eval mode."""
    torch.manual_seed(0)
    model, x = PseudoLabels(), 3 * torch.randn(16, 4) + 5
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.0), rho=1e-8, model=model)
    for step in range(3):
        if form == "closure":
            opt.step(references.closure_of(opt, lambda: pseudo_label_loss(model, x)))
        else:
            opt.zero_grad()
            loss = pseudo_label_loss(model, x)
            loss.backward()
            with opt.perturbed(loss) as second:
                second.loss = pseudo_label_loss(model, x)
                second.loss.backward()
            opt.step()
        assert step == 0 or abs(opt.metrics.sharpness.item()) < 1e-4
        assert model.net[1].num_batches_tracked == step + 1
        assert opt._passes.replay.reads_statistics
    for reads in (False, False):  # what is not read is not copied
        opt.step(references.closure_of(opt, lambda: model(x).square().mean()))
        assert opt._passes.replay.reads_statistics == reads


def test_cached_parametrizations_are_computed_anew_at_the_perturbed_weights():
    torch.manual_seed(0)
    (model, x), (other, _) = ((nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), torch.randn(8, 4)) for _ in "ab")
    other.load_state_dict(model.state_dict())
    opt, plain = (SAM(torch.optim.SGD(m.parameters(), lr=0.1), rho=0.5, model=m) for m in (model, other))
    with nn.utils.parametrize.cached():
        opt.step(references.closure_of(opt, lambda: model(x).square().mean()))
    plain.step(references.closure_of(plain, lambda: other(x).square().mean()))
    assert opt.metrics.sharpness > 0
    assert torch.equal(references.flat(model.parameters()), references.flat(other.parameters()))


def make(kind, rho=1e-3, **settings):
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    model = MODELS[kind]().double() if kind in ("queue", "teacher") else MODELS[kind]()
    x = torch.randn(8, 4).to(next(model.parameters()).dtype)
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.05), rho=rho, model=model, **settings)
    return model, opt, x


def closure_of(model, opt, x):
    return references.closure_of(opt, lambda: model(x))


def step(way, model, opt, x):
    halves = [x[:4], x[4:]]
    if way in ("closure", "ascent steps"):
        opt.step(closure_of(model, opt, x))
    elif way == "list":
        opt.step([closure_of(model, opt, half) for half in halves])
    elif way == "parts":
        opt.step_batch(model, x, part=0.5, m=2)
    elif way == "plain step_batch":
        opt.step_batch(model, x)
    else:
        batches = halves if way == "accumulated" else [x]
        opt.zero_grad()
        first = sum(_backward(model, half) for half in batches)
        with opt.perturbed(first) as second:
            second.loss = sum(_backward(model, half) for half in batches)
        opt.step()


def _backward(model, x):
    loss = model(x)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_without_a_radius_to_speak_of_nothing_changes_between_the_passes(kind, way):
    model, opt, x = make(kind, rho=1e-7, ascent_steps=3 if way == "ascent steps" else 1)
    for _ in range(3):
        step(way, model, opt, x)
        assert abs(opt.metrics.sharpness.item()) < 1e-5


def state_of(model):
    return {name: t.clone() for name, t in model.state_dict().items()}


def everything(model):
    return state_of(model), torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002


def restore(model, saved):
    """Put back all but the trained weights."""
    state, torch_state, python_state, _ = saved
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    model.load_state_dict({name: t for name, t in state.items() if name not in trained}, strict=False)
    torch.set_rng_state(torch_state)
    random.setstate(python_state)


@pytest.mark.parametrize("kind", ["queue", "assigned queue", "teacher", "spectral norm", "torch", "python"])
@pytest.mark.parametrize("way", ["closure", "two passes", "accumulated"])
def test_gradient_and_state_are_those_of_a_handwritten_sam_that_repeats_the_state(kind, way):
    model, opt, x = make(kind, rho=0.5)
    batches = [x[:4], x[4:]] if way == "accumulated" else [x]
    before = everything(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    for half in batches:
        model(half).backward()
    after = everything(model)
    norm = torch.cat([p.grad.flatten() for p in trained]).norm()
    steps = [0.5 * p.grad / norm for p in trained]
    weights = [p.detach().clone() for p in trained]
    restore(model, before)
    with torch.no_grad():
        for p, eps in zip(trained, steps, strict=True):
            p.add_(eps)
            p.grad = None
    for half in batches:
        model(half).backward()
    expected = [w - 0.05 * p.grad for w, p in zip(weights, trained, strict=True)]
    restore(model, before)
    with torch.no_grad():
        for p, w in zip(trained, weights, strict=True):
            p.copy_(w)

    step(way, model, opt, x)
    for p, known in zip(trained, expected, strict=True):
        torch.testing.assert_close(p.detach(), known)
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    for name, value in state_of(model).items():
        if name not in names:
            torch.testing.assert_close(value, after[0][name], msg=name)
    assert torch.equal(torch.get_rng_state(), after[1])
    assert random.getstate() == after[2]


@pytest.mark.parametrize("kind", ["queue", "teacher", "teacher in place"])
def test_a_step_with_a_rest_leaves_the_state_of_the_rest(kind):
    model, opt, x = make(kind)
    reference = copy.deepcopy(model)
    reference(x[4:])
    opt.step_batch(model, x, part=0.5, m=2)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    for name, value in state_of(model).items():
        if name not in trained:
            assert torch.equal(value, reference.state_dict()[name]), name


def test_a_direction_without_a_first_pass_keeps_the_state_of_its_only_pass():
    model, opt, x = make("queue", direction="random")
    before = model.queue.clone()
    opt.step(closure_of(model, opt, x))
    assert not torch.equal(before, model.queue)


def test_large_frozen_models_are_not_copied():
    """LoRA: a copy of the frozen weights would double the memory."""
    model = nn.Sequential(*[nn.Linear(64, 64).requires_grad_(False) for _ in range(5)], nn.Linear(64, 64))
    opt = SAM(torch.optim.SGD(model[-1].parameters(), lr=0.1), model=model)
    x = torch.randn(2, 64)
    held = opt._passes.start()
    assert [saved.copy for saved in held.model._saved] == [None] * 10
    opt.step_batch(lambda x: model(x).square().mean(), x)


# Where zero_grad() stands.


def dropout_loop(order, with_model, data_noise=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.05), rho=1e-7, model=model if with_model else None)
    for _ in range(3):
        x = torch.randn(8, 4) if data_noise else torch.ones(8, 4)
        if order == "before the forward pass":
            opt.zero_grad()
        if order == "the model's":
            model.zero_grad()
        loss = model(x).square().mean()
        if order == "between forward and backward":
            opt.zero_grad()
        loss.backward()
        with opt.perturbed(loss) as second:
            second.loss = model(x).square().mean()
            second.loss.backward()
        opt.step()
        if order == "after the step":
            opt.zero_grad()
        assert abs(opt.metrics.sharpness.item()) < 1e-5


ORDERS = ["before the forward pass", "between forward and backward", "after the step", "the model's"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("data_noise", [False, True])
def test_dropout_is_replayed_wherever_zero_grad_stands(order, data_noise):
    dropout_loop(order, with_model=True, data_noise=data_noise)


@pytest.mark.parametrize("order", ORDERS)
def test_without_the_model_noise_is_replayed_or_an_error_says_what_to_do(order):
    if order == "before the forward pass":
        dropout_loop(order, with_model=False, data_noise=True)
        return
    with pytest.raises(ValueError, match=r"torch's generator.*opt.zero_grad\(\) after drawing the batch.*check_pass"):
        dropout_loop(order, with_model=False, data_noise=True)


@pytest.mark.parametrize("order", ORDERS)
def test_a_queue_is_repeated_wherever_zero_grad_stands(order):
    model, opt, x = make("queue", rho=1e-7)
    for _ in range(3):
        if order == "before the forward pass":
            opt.zero_grad()
        if order == "the model's":
            model.zero_grad()
        loss = model(x)
        if order == "between forward and backward":
            opt.zero_grad()
        loss.backward()
        with opt.perturbed(loss) as second:
            second.loss = model(x)
            second.loss.backward()
        opt.step()
        if order == "after the step":
            opt.zero_grad()
        assert abs(opt.metrics.sharpness.item()) < 1e-5


@pytest.mark.parametrize("zero_grad", ["right before the pass", "before both passes", "after the steps"])
@pytest.mark.parametrize("base", ["SAM", "SGD"])
def test_a_generators_second_pass_sees_the_discriminator_that_its_first_one_saw(zero_grad, base):
    """The discriminator takes its step between the generator's zero_grad() and its first pass."""
    torch.manual_seed(0)
    generator, discriminator = (nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, n)) for n in (2, 1))
    models = nn.ModuleList([generator, discriminator])
    opt_g = SAM(torch.optim.SGD(generator.parameters(), lr=0.05), rho=1e-6, model=models)
    opt_d = torch.optim.SGD(discriminator.parameters(), lr=1.0)
    opt_d = SAM(opt_d, rho=1e-6, model=models) if base == "SAM" else opt_d

    def loss_d():
        loss = discriminator(generator(latents).detach()).square().mean()
        loss.backward()

    for step in range(3):
        latents = torch.randn(8, 2)
        if zero_grad == "before both passes":
            opt_g.zero_grad()
        if zero_grad != "after the steps":
            opt_d.zero_grad()
        loss_d()
        if base == "SAM":
            with opt_d.perturbed():
                loss_d()
        opt_d.step()
        if zero_grad == "right before the pass":
            opt_g.zero_grad()
        loss = discriminator(generator(latents)).sin().mean()
        loss.backward()
        with opt_g.perturbed(loss) as second:
            second.loss = discriminator(generator(latents)).sin().mean()
            second.loss.backward()
        opt_g.step()
        assert abs(opt_g.metrics.sharpness.item()) < 1e-5, step
        if zero_grad == "after the steps":
            opt_g.zero_grad()
        opt_d.zero_grad()


def test_a_teacher_that_is_updated_after_zero_grad_is_the_same_in_both_passes():
    torch.manual_seed(0)
    student, teacher = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
    both = nn.ModuleDict({"student": student, "teacher": teacher})
    opt = SAM(torch.optim.SGD(student.parameters(), lr=0.5), rho=0.1, model=both)
    for _ in range(3):
        seen = []
        x = torch.randn(8, 3)

        def loss(x=x, seen=seen):
            seen.append(teacher.weight.clone())
            return (student(x) - teacher(x)).square().mean()

        loss().backward()
        with opt.perturbed():
            loss().backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            teacher.weight.lerp_(student.weight, 0.5)
        assert torch.equal(*seen)


def test_noise_drawn_before_the_model_is_called_is_replayed_from_zero_grad_on():
    """The latents of a GAN, the time steps of a diffusion model; the model also runs in another optimizer's step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.05), rho=1e-7, model=model)
    for _ in range(3):
        model(torch.randn(8, 4)).sum().backward()  # the generator's step
        opt.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        with opt.perturbed(loss) as second:
            second.loss = model(torch.randn(8, 4)).square().mean()
            second.loss.backward()
        opt.step()
        assert abs(opt.metrics.sharpness.item()) < 1e-5


def test_micro_batches_drawn_between_passes_have_the_masks_of_the_first_pass():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.05), rho=1e-7, model=model)
    opt.zero_grad()
    batches, first = [], 0
    for _ in range(3):
        batches.append(torch.randn(8, 4))
        first += _backward(lambda x: model(x).square().mean(), batches[-1])
    with opt.perturbed(first) as second:
        second.loss = sum(_backward(lambda x: model(x).square().mean(), x) for x in batches)
    opt.step()
    assert abs(opt.metrics.sharpness.item()) < 1e-5


def test_a_second_pass_without_noise_may_follow_data_that_was_drawn():
    """A shuffled loader draws after zero_grad(); a pass without random layers has nothing to replay."""
    model = nn.Linear(4, 1)
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.05))
    for _ in range(2):
        opt.zero_grad()
        x = torch.randn(8, 4)
        model(x).square().mean().backward()
        with opt.perturbed():
            model(x).square().mean().backward()
        opt.step()


def test_two_optimizers_may_be_perturbed_at_once_in_one_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.BatchNorm1d(4))
    one = SAM(torch.optim.SGD(model[0].parameters(), lr=0.05), rho=0.3, model=model)
    two = SAM(torch.optim.SGD(model[2].parameters(), lr=0.05), rho=0.4, model=model)
    x = torch.randn(8, 4)
    before = [p.detach().clone() for p in (model[0].weight, model[2].weight)]
    after = copy.deepcopy(model)
    for _ in range(2):
        one.zero_grad()
        two.zero_grad()
        model(x).square().mean().backward()
        with one.perturbed(), two.perturbed():
            moved = [p.detach().clone() for p in (model[0].weight, model[2].weight)]
            assert not any(torch.equal(a, b) for a, b in zip(before, moved, strict=True))
            model(x).square().mean().backward()
        after(x)
        assert model[3].num_batches_tracked == after[3].num_batches_tracked
        one.step()
        two.step()


def test_a_copy_of_the_model_has_no_part_in_it(tmp_path):
    model, opt, x = make("torch")
    twin = copy.deepcopy(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    opt.zero_grad()
    for other in (twin, loaded):
        other(x)
    assert opt._passes.replay._forwards == []


# Accumulation.


@pytest.mark.parametrize("zero", ["opt", "opt in place", "model"])
def test_only_the_last_micro_batch_within_the_block_is_refused_with_the_right_loop(zero):
    model = nn.Linear(4, 1)
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.05))
    before = model.weight.detach().clone()

    def run():
        for i, x in enumerate(torch.randn(4, 8, 4)):
            loss = model(x).square().mean() / 4
            loss.backward()
            if (i + 1) % 4 == 0:
                with opt.perturbed():
                    (model(x).square().mean() / 4).backward()
                opt.step()
                model.zero_grad() if zero == "model" else opt.zero_grad(set_to_none=zero == "opt")

    with pytest.raises(ValueError, match="4 backward passes before .* 1 within it.*\n.*opt.zero_grad"):
        run()
    assert torch.equal(model.weight, before)
    assert not opt.is_perturbed


def test_gradients_that_were_changed_in_place_are_not_taken_for_more_passes():
    """Clipping or averaging before the block, zeroing in place after the step."""
    model = nn.Linear(4, 1)
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.05))
    x = torch.randn(8, 4)
    for _ in range(3):
        model.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        model.weight.grad.div_(2)
        with opt.perturbed():
            model(x).square().mean().backward()
        opt.step()


# Hooks and pure functions.


def test_step_batch_runs_what_torch_runs_around_a_step():
    model, opt, x = make("torch")
    calls = []
    opt.register_step_pre_hook(lambda *_: calls.append("pre"))
    opt.register_step_post_hook(lambda *_: calls.append("post"))
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)
    with torch.profiler.profile() as profiler:
        opt.step_batch(model, x)
        opt.step_batch(model, x, part=0.5)
    scheduler.step()  # warnings are errors: the order is right
    assert calls == ["pre", "post"] * 2
    names = [event.key for event in profiler.key_averages()]
    assert "Optimizer.step#SAM.step" in names


def test_sam_gradient_changes_no_buffer():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    x = torch.randn(8, 4)
    before = state_of(model)
    params = dict(model.named_parameters())
    sam_gradient(lambda w: torch.func.functional_call(model, w, (x,)).square().mean(), params)
    for name, value in state_of(model).items():
        assert torch.equal(value, before[name]), name
