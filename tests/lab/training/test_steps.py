"""Single steps against loops written out by hand."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flatmin.lab.data.pipeline import Batch
from flatmin.lab.errors import ModelError
from flatmin.lab.models.build import build_model
from flatmin.lab.models.shake import ShakeShake
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim, passes_per_step
from flatmin.lab.training.distributed import Workers
from flatmin.lab.training.evaluation import loss_and_error
from flatmin.lab.training.schedule import learning_rate
from flatmin.lab.training.steps import Stepper

CPU = torch.device("cpu")


def a_batch(n=12, size=8, seed=0, own_weight=1.0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 10
    return Batch(
        number=0,
        examples=np.arange(n),
        inputs=torch.randn(n, 1, size, size, generator=generator),
        labels=labels,
        partner_labels=labels.flip(0),
        own_weight=own_weight,
        share=1.0,
    )


def a_stepper(network="cnn-4", **optim):
    """A stepper in float64, and a copy of its network."""
    experiment = Experiment(model=Model(name=network), optim=Optim(**optim), data=Data(), precision="float32")
    torch.manual_seed(0)
    net = build_model(experiment.model, num_classes=10, in_channels=1).double()
    reference = copy.deepcopy(net)
    stepper = Stepper(experiment, net, 0, Workers(device=CPU))
    return stepper, reference


def take(stepper, batches, lr=0.1):
    for number, batch in enumerate(batches):
        stepper.network.train()
        batch = copy.copy(batch)
        object.__setattr__(batch, "inputs", batch.inputs.double())
        measured = stepper.step(batch, number, lr)
    return measured


def loss_of(network, batch, **keywords):
    return F.cross_entropy(network(batch.inputs.double()), batch.labels, **keywords)


def assert_same(network, reference, tolerance=1e-6):
    # Losses are computed in float32 from float64 logits: hence not exact.
    for (name, a), b in zip(network.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


def sam_gradient_by_hand(network, loss, rho, perturbed=lambda name: True):
    """Backward at w, climb, backward at w + eps, come back; returns the gradients at w + eps."""
    parameters = list(network.parameters())
    grads = torch.autograd.grad(loss(), parameters)
    grads = [g if perturbed(n) else 0 * g for (n, _), g in zip(network.named_parameters(), grads, strict=True)]
    norm = torch.sqrt(sum((g**2).sum() for g in grads))
    with torch.no_grad():
        for p, g in zip(parameters, grads, strict=True):
            p.add_(rho * g / norm)
    statistics = {k: v.clone() for k, v in network.named_buffers()}
    at_eps = torch.autograd.grad(loss(), parameters)
    with torch.no_grad():
        for p, g in zip(parameters, grads, strict=True):
            p.sub_(rho * g / norm)
        for k, v in network.named_buffers():
            v.copy_(statistics[k])
    return at_eps


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW


@pytest.mark.parametrize(
    ("optim", "make"),
    [
        ({"weight_decay": 1e-2}, partial(SGD, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-2)),
        ({"nesterov": False, "momentum": 0.5, "weight_decay": 0.0}, partial(SGD, lr=0.01, momentum=0.5)),
        ({"name": "adamw", "weight_decay": 0.1}, partial(ADAMW, lr=0.01, weight_decay=0.1)),
    ],
)
def test_a_plain_step_is_that_of_a_loop_written_by_hand(optim, make):
    stepper, reference = a_stepper(label_smoothing=0.1, **optim)
    batches = [a_batch(seed=s) for s in range(3)]
    take(stepper, batches, lr=0.01)
    optimizer = make(reference.parameters())
    for batch in batches:
        optimizer.zero_grad()
        loss_of(reference, batch, label_smoothing=0.1).backward()
        optimizer.step()
    assert_same(stepper.network, reference)


@pytest.mark.parametrize("network", ["cnn-4", "wrn-10-1"])
def test_a_sam_step_is_that_of_a_loop_written_by_hand_with_statistics_of_the_first_pass(network):
    stepper, reference = a_stepper(network, rho=0.5, weight_decay=1e-2)
    measured = take(stepper, [a_batch()])
    reference.train()
    start = copy.deepcopy(reference)
    grads = sam_gradient_by_hand(reference, lambda: loss_of(reference, a_batch()), 0.5)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2)
    for p, g in zip(reference.parameters(), grads, strict=True):
        p.grad = g
    optimizer.step()
    assert_same(stepper.network, reference, 1e-5)
    assert measured.at_w.loss.item() == pytest.approx(loss_of(start, a_batch()).item(), rel=1e-5)
    assert measured.perturbed.loss > measured.at_w.loss


def test_on_norm_layers_eps_has_the_norm_of_their_gradient_alone_and_all_parameters_are_trained():
    """eps = rho g_N / |g_N| on scales and shifts, 0 elsewhere; every parameter takes its gradient at w + eps."""
    stepper, reference = a_stepper("wrn-10-1", rho=0.5, perturb="norm", weight_decay=1e-2, clip_norm=0.1)
    take(stepper, [a_batch()])
    reference.train()
    start = {name: p.detach().clone() for name, p in reference.named_parameters()}
    norms = {f"{n}." for n, layer in reference.named_modules() if isinstance(layer, torch.nn.BatchNorm2d)}
    grads = sam_gradient_by_hand(
        reference, lambda: loss_of(reference, a_batch()), 0.5, lambda name: name.startswith(tuple(norms))
    )
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2)
    for p, g in zip(reference.parameters(), grads, strict=True):
        p.grad = g
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    optimizer.step()
    assert_same(stepper.network, reference, 1e-5)
    assert all(not torch.equal(p, start[name]) for name, p in stepper.network.named_parameters())


def test_a_model_without_norm_layers_has_no_sam_on_them():
    with pytest.raises(ModelError, match=r"optim\.perturb is norm, but the model has no normalization layer"):
        a_stepper("cnn-4", rho=0.5, perturb="norm")


def test_decay_in_the_loss_takes_part_in_the_perturbation_and_decay_in_the_optimizer_does_not():
    """Without SAM both are the same; with SAM the one in the loss is lambda w at w + eps, with eps from L + decay."""
    for rho in (0.0, 0.5):
        stepper, reference = a_stepper(decay="loss", weight_decay=0.1, rho=rho, momentum=0.0, nesterov=False)
        take(stepper, [a_batch()])

        def objective(network=reference):
            return loss_of(network, a_batch()) + 0.05 * sum((p**2).sum() for p in network.parameters())

        grads = (
            sam_gradient_by_hand(reference, objective, rho)
            if rho
            else torch.autograd.grad(objective(), list(reference.parameters()))
        )
        with torch.no_grad():
            for p, g in zip(reference.parameters(), grads, strict=True):
                p.sub_(0.1 * g)
        assert_same(stepper.network, reference)
        other, _ = a_stepper(decay="optimizer", weight_decay=0.1, rho=rho, momentum=0.0, nesterov=False)
        take(other, [a_batch()])
        pairs = zip(other.network.parameters(), stepper.network.parameters(), strict=True)
        same = all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)
        assert same == (rho == 0.0)


@pytest.mark.parametrize("network", ["cnn-4", "wrn-10-1"])
def test_m_gives_each_micro_batch_its_own_eps_and_averages_statistics_from_the_same_start(network):
    batch = a_batch(n=10)
    stepper, reference = a_stepper(network, rho=0.5, m=4, momentum=0.0, nesterov=False, weight_decay=0.0)
    take(stepper, [batch])
    reference.train()
    start = copy.deepcopy(reference.state_dict())
    total = [torch.zeros_like(p) for p in reference.parameters()]
    statistics = []
    for part in batch.split(3):
        reference.load_state_dict(start)
        grads = sam_gradient_by_hand(reference, lambda part=part: loss_of(reference, part), 0.5)
        statistics.append({k: v.clone() for k, v in reference.named_buffers()})
        for t, g in zip(total, grads, strict=True):
            t.add_(g, alpha=len(part.examples) / 10)
    reference.load_state_dict(start)
    with torch.no_grad():
        for p, g in zip(reference.parameters(), total, strict=True):
            p.sub_(0.1 * g)
        for k, v in reference.named_buffers():
            v.copy_(sum(s[k].double() for s in statistics) / 3)
    assert_same(stepper.network, reference, 1e-5)


@pytest.mark.parametrize("network", ["cnn-4", "wrn-10-1"])
def test_m_without_sam_normalizes_by_micro_batch_and_averages_gradients_and_statistics(network):
    stepper, reference = a_stepper(network, m=5, momentum=0.9, nesterov=False, weight_decay=0.01, decay="loss")
    batch = a_batch(12)
    take(stepper, [batch])
    parts = batch.split(3)
    start = {k: v.clone() for k, v in reference.named_buffers()}
    grads, ends = [], []
    for part in parts:
        for name, buffer in reference.named_buffers():
            buffer.data.copy_(start[name])
        reference.train()
        total = loss_of(reference, part) + 0.005 * sum((p**2).sum() for p in reference.parameters())
        grads.append(torch.autograd.grad(total, list(reference.parameters())))
        ends.append({k: v.clone() for k, v in reference.named_buffers()})
    with torch.no_grad():
        for i, p in enumerate(reference.parameters()):
            p.sub_(0.1 * sum(len(part.labels) / 12 * g[i] for part, g in zip(parts, grads, strict=True)))
        for name, buffer in reference.named_buffers():
            if name.rpartition(".")[2].startswith("running_"):
                buffer.copy_(sum(end[name] for end in ends) / 3)
    assert_same(stepper.network, reference)


def test_second_order_is_the_exact_gradient_through_eps():
    stepper, reference = a_stepper("cnn-4", rho=0.5, second_order=True, momentum=0.0, nesterov=False, weight_decay=0.0)
    take(stepper, [a_batch()])
    parameters = dict(reference.named_parameters())
    loss = loss_of(reference, a_batch())
    grads = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
    norm = torch.sqrt(sum((g**2).sum() for g in grads))
    moved = {k: p + 0.5 * g / norm for (k, p), g in zip(parameters.items(), grads, strict=True)}
    logits = torch.func.functional_call(reference, moved, (a_batch().inputs.double(),))
    exact = torch.autograd.grad(F.cross_entropy(logits, a_batch().labels), list(parameters.values()))
    with torch.no_grad():
        for p, g in zip(parameters.values(), exact, strict=True):
            p.sub_(0.1 * g)
    assert_same(stepper.network, reference, 1e-5)
    first_order, _ = a_stepper("cnn-4", rho=0.5, momentum=0.0, nesterov=False, weight_decay=0.0)
    take(first_order, [a_batch()])
    assert not torch.allclose(first_order.network.head.weight, reference.head.weight, atol=1e-4)


def test_second_order_keeps_the_statistics_of_the_first_pass():
    stepper, reference = a_stepper("wrn-10-1", rho=0.5, second_order=True)
    take(stepper, [a_batch()])
    reference.train()
    loss_of(reference, a_batch())
    for (name, a), b in zip(stepper.network.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("rho", [0.0, 0.3])
def test_the_gradient_of_the_base_step_is_clipped_and_only_that(rho):
    """With plain SGD the update is lr times a gradient of norm exactly the limit; eps keeps its norm rho."""
    stepper, reference = a_stepper(rho=rho, clip_norm=0.01, momentum=0.0, nesterov=False, weight_decay=0.0)
    take(stepper, [a_batch()], lr=1.0)
    pairs = zip(stepper.network.parameters(), reference.parameters(), strict=True)
    assert torch.sqrt(sum(((a - b) ** 2).sum() for a, b in pairs)).item() == pytest.approx(0.01, rel=1e-4)
    if rho:
        assert stepper.optimizer.metrics.perturbation_norm.item() == pytest.approx(rho, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "num_steps", "expected"),
    [
        ({"rho": 0.0}, 1, [False]),
        ({}, 1, [True, False]),
        ({"ascent_steps": 2}, 1, [True, True, False]),
        ({"ascent_part": 0.5}, 1, [True, False]),
        ({"every": 2}, 2, [True, False, False]),  # a step with SAM, and a plain one
        ({"direction": "momentum"}, 1, [False]),
    ],
)
def test_shake_layers_use_the_true_gradient_in_ascents_only(settings, num_steps, expected, monkeypatch):
    seen = []
    original = ShakeShake.forward

    def spy(self, first, second):
        seen.append(self.use_true_gradient)
        return original(self, first, second)

    monkeypatch.setattr(ShakeShake, "forward", spy)
    stepper, _ = a_stepper("shake-shake-8-2x4d", **{"rho": 0.1} | settings)
    take(stepper, [a_batch(size=16)] * num_steps)
    assert seen == [true for true in expected for _ in range(3)]  # three blocks a pass


def test_random_directions_measure_at_w_and_depend_on_the_step_and_seed_only():
    first, reference = a_stepper(rho=0.5, direction="random")
    measured = take(first, [a_batch()])
    assert measured.at_w.loss.item() == pytest.approx(loss_of(reference, a_batch()).item(), rel=1e-5)
    assert measured.at_w.loss != measured.perturbed.loss
    second, _ = a_stepper(rho=0.5, direction="random")
    torch.manual_seed(123)
    take(second, [a_batch()])
    assert_same(first.network, second.network, 0.0)


def test_adaptive_and_other_norms_reach_sam():
    stepper, _ = a_stepper(rho=0.7, p=float("inf"), adaptive=0.2, ascent_steps=2)
    assert stepper.optimizer.eta == 0.2
    assert stepper.optimizer.p == float("inf")
    assert stepper.optimizer.rho == 0.7
    assert stepper.optimizer.ascent_steps == 2
    take(stepper, [a_batch()])


def test_loss_and_error_mix_as_the_images_do():
    batch = a_batch(own_weight=0.7)
    logits = torch.randn(12, 10, generator=torch.Generator().manual_seed(1))
    loss, error = loss_and_error(logits, batch)
    log_p = logits.log_softmax(1)
    rows = torch.arange(12)
    expected = -(0.7 * log_p[rows, batch.labels] + 0.3 * log_p[rows, batch.partner_labels]).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    wrong = (logits.argmax(1) != batch.labels).float() * 0.7 + (logits.argmax(1) != batch.partner_labels).float() * 0.3
    assert error.item() == pytest.approx(wrong.mean().item(), rel=1e-6)


def test_label_smoothing_is_the_closed_form():
    """(1 - s) CE + s times the mean over classes of -log p."""
    batch = a_batch()
    logits = torch.randn(12, 10, generator=torch.Generator().manual_seed(1))
    log_p = logits.log_softmax(1)
    expected = 0.9 * -log_p[torch.arange(12), batch.labels].mean() - 0.1 * log_p.mean()
    assert loss_and_error(logits, batch, 0.1)[0].item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_larger_share_of_the_batch_counts_more():
    """Two workers with 2/3 and 1/3 of a batch: the mean of their scaled gradients is the gradient of the whole."""
    whole = a_batch(n=12)
    big, small = (whole.split(3)[:2], whole.split(3)[2])
    stepper, reference = a_stepper(momentum=0.0, nesterov=False, weight_decay=0.0)
    expected = torch.autograd.grad(loss_of(reference, whole), list(reference.parameters()))
    total = [torch.zeros_like(g) for g in expected]
    for inputs, labels in (
        (torch.cat([p.inputs for p in big]), torch.cat([p.labels for p in big])),
        (small.inputs, small.labels),
    ):
        part = Batch(
            number=0,
            examples=np.arange(len(labels)),
            inputs=inputs.double(),
            labels=labels,
            partner_labels=labels,
            own_weight=1.0,
            share=len(labels) * 2 / 12,
        )
        stepper._pass(part, part.share)
        for t, p in zip(total, stepper.network.parameters(), strict=True):
            t.add_(p.grad, alpha=0.5)
    for t, g in zip(total, expected, strict=True):
        torch.testing.assert_close(t, g, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({"part": 1 / 4}, 1.25),
        ({"part": 1 / 4, "m": 2}, 1.25),
        ({"every": 2}, 1.5),
        ({"ascent_part": 1 / 2}, 1.5),
        ({"direction": "momentum"}, 1.0),
        ({"weight": 0.0}, 1.0),
        ({"weight": 2.0}, 2.0),
    ],
)
def test_cheap_steps_pass_as_many_examples_as_they_are_said_to_cost(settings, passes):
    """Over two steps, counted in examples that pass forward."""
    stepper, _ = a_stepper(rho=0.1, **settings)
    assert passes_per_step(Experiment(model=Model(name="cnn-4"), optim=stepper.optim)) == passes
    seen = []
    stepper.network.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    take(stepper, [a_batch(16), a_batch(16, seed=1)])
    assert sum(seen) == 2 * 16 * passes


@pytest.mark.parametrize("network", ["cnn-4", "wrn-10-1"])
def test_a_part_is_corrected_at_full_strength_and_the_rest_gives_the_statistics(network):
    """g_batch(w) + g_part(w + eps) - g_part(w), where batch norm sees part and rest apart."""
    stepper, reference = a_stepper(network, rho=0.1, part=1 / 4, momentum=0.0, nesterov=False, weight_decay=0.0)
    batch = a_batch(16)
    measured = take(stepper, [batch])
    part, rest = batch.slice(0, 4), batch.slice(4, 16)
    statistics = copy.deepcopy(reference)
    parameters = list(reference.parameters())
    of_part = torch.autograd.grad(loss_of(reference, part), parameters)
    at_eps = sam_gradient_by_hand(reference, lambda: loss_of(reference, part), 0.1)
    of_rest = torch.autograd.grad(loss_of(reference, rest), parameters)
    with torch.no_grad():
        for p, a, b, r in zip(parameters, of_part, at_eps, of_rest, strict=True):
            p -= 0.1 * (a / 4 + 3 * r / 4 + b - a)
    loss_of(statistics, rest)
    reference.load_state_dict(dict(statistics.named_buffers()), strict=False)
    assert_same(stepper.network, reference)
    assert measured.at_w.loss.shape == ()


# The learning rate, in closed form.


def rates(num_steps=100, steps_per_epoch=10, **optim):
    return [learning_rate(Optim(lr=0.4, **optim), step, num_steps, steps_per_epoch) for step in range(num_steps)]


def test_cosine_starts_at_the_peak_and_ends_one_step_before_zero():
    for step, lr in enumerate(rates()):
        assert lr == pytest.approx(0.2 * (1 + math.cos(math.pi * step / 100)))


def test_step_multiplies_by_a_fifth_after_thirty_sixty_and_eighty_percent():
    """Wide ResNets: 60, 120 and 160 of 200 epochs."""
    found = rates(schedule="step")
    assert found[29] == 0.4
    assert found[30] == pytest.approx(0.08)
    assert found[60] == pytest.approx(0.016)
    assert found[79] == pytest.approx(0.016)
    assert found[80] == pytest.approx(0.0032)


def test_constant_stays():
    assert set(rates(schedule="constant")) == {0.4}


@pytest.mark.parametrize("schedule", ["cosine", "step", "constant"])
def test_warm_up_rises_linearly_to_the_peak(schedule):
    found = rates(schedule=schedule, warmup_epochs=2.5)  # 25 steps
    assert found[:25] == pytest.approx([0.4 * (step + 1) / 26 for step in range(25)])
    assert found[25] == pytest.approx(0.4)


def test_cosine_after_warm_up_spans_the_remaining_steps():
    found = rates(warmup_epochs=2)
    assert found[60] == pytest.approx(0.2)  # the middle of 20 .. 100
