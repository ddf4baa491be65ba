"""What training scripts do: each of these once trained something else than SAM, or failed without saying why."""

import gc
import math
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import references
from flatmin import SAM, effective_perturbation, sam_gradient


def make(**settings):
    torch.manual_seed(0)
    w = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    return w, SAM(torch.optim.SGD([w], lr=0.1), **({"rho": 0.3} | settings))


def loss_of(w):
    return (w**4).sum() + w[0] * w[1]


def closure_of(w, opt):
    return references.closure_of(opt, lambda: loss_of(w))


@pytest.mark.parametrize("zeroes", [True, False])
def test_a_real_closure_after_a_finished_block_takes_a_sam_step(zeroes):
    """The block may have been entered only to measure."""
    w, opt = make()
    start = w.detach().clone()
    loss_of(w).backward()
    with opt.perturbed():
        loss_of(w).backward()
    if zeroes:
        opt.step(closure_of(w, opt))
    else:
        w.grad = None
        opt.step(lambda: (loss := loss_of(w)).backward() or loss)
    torch.testing.assert_close(w.detach(), start - 0.1 * references.sam_gradient(loss_of, start, 0.3)[0])


def test_gradients_changed_in_place_keep_the_permission():
    w, opt = make()
    loss_of(w).backward()
    with opt.perturbed():
        loss_of(w).backward()
    w.grad.mul_(0.5)
    nn.utils.clip_grad_norm_([w], 0.1)
    opt.step()


def test_a_closure_that_adds_to_older_gradients_warns_once():
    w, opt = make()
    loss_of(w).backward()

    def accumulating():
        loss = loss_of(w)
        loss.backward()
        return loss

    with pytest.warns(UserWarning, match="accumulated into an existing gradient"):
        opt.step(accumulating)
    opt.step(accumulating)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_closure_that_zeroes_them_does_not_warn(set_to_none):
    w, opt = make()
    loss_of(w).backward()

    def closure():
        opt.zero_grad(set_to_none=set_to_none)
        loss = loss_of(w)
        loss.backward()
        return loss

    opt.step(closure)
    opt.step(closure)


def test_the_second_order_term_of_a_complex_parameter_is_that_of_its_two_parts():
    start = torch.tensor([1.0 + 2.0j, -0.5 + 0.1j], dtype=torch.complex128)

    def complex_loss(t):
        return (t[0].abs() ** 4).sum() + (t[0][0] * t[0][1]).real

    def real_loss(t):
        return complex_loss([torch.view_as_complex(t[0])])

    got = sam_gradient(complex_loss, [start], rho=0.3, second_order=True).grads[0]
    expected = sam_gradient(real_loss, [torch.view_as_real(start)], rho=0.3, second_order=True).grads[0]
    torch.testing.assert_close(torch.view_as_real(got), expected)


def test_statistics_are_those_of_the_first_pass_in_spite_of_a_mode_set_in_the_closure():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5, model=model)
    x, seen = torch.randn(8, 3), []

    def closure():
        model.train()
        opt.zero_grad()
        loss = model(x).pow(3).sum()
        loss.backward()
        seen.append([b.clone() for b in model.buffers()])
        model.eval()
        return loss

    opt.step(closure)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), seen[0], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(seen[0], seen[1], strict=True))


def test_numbers_of_numpy_are_numbers():
    w, _ = make()
    opt = SAM(torch.optim.SGD([w], lr=0.1), rho=np.float32(0.5), p=np.float64(2), adaptive=np.float32(0.1))
    assert (opt.rho, opt.p) == (0.5, 2.0)


@pytest.mark.parametrize("size", [1e-170, 1e170])
def test_double_precision_has_the_range_of_double_precision(size):
    w, opt = make()
    w.grad = torch.full_like(w, size)
    with opt.perturbed():
        moved = w.detach() - torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    assert moved.norm().item() == pytest.approx(0.3)
    assert not math.isnan(opt.metrics.grad_norm)


def test_a_first_pass_that_adds_to_the_last_steps_gradients_warns_once():
    w, opt = make()

    def step(zero):
        zero()
        loss_of(w).backward()
        with opt.perturbed():
            loss_of(w).backward()
        opt.step()

    step(lambda: None)
    step(opt.zero_grad)
    step(lambda: opt.zero_grad(set_to_none=False))
    step(lambda: setattr(w, "grad", None))
    with pytest.warns(UserWarning, match=r"Call opt.zero_grad\(\) before the first pass"):
        step(lambda: None)
    step(lambda: None)


@pytest.mark.parametrize(("given", "hint"), [(torch.tensor(1.0), "Did you pass the loss"), (3, "got int")])
def test_what_is_no_closure_is_refused_with_what_one_is(given, hint):
    w, opt = make()
    start = w.detach().clone()
    with pytest.raises(TypeError, match=f"closure must be a function.*{hint}"):
        opt.step(given)
    assert torch.equal(w, start)


def test_a_model_without_any_of_the_parameters_is_warned_of():
    w, _ = make()
    with pytest.warns(UserWarning, match="model has none of the parameters of the optimizer"):
        SAM(torch.optim.SGD([w], lr=0.1), model=nn.Linear(2, 2))
    layer = nn.Linear(2, 2)
    SAM(torch.optim.SGD([layer.weight], lr=0.1), model=nn.Sequential(layer, nn.Linear(2, 2)))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_is_twice_in_a_group_counts_once():
    w = nn.Parameter(torch.tensor([3.0, 4.0]))
    opt = SAM(torch.optim.SGD([w, w], lr=0.1), rho=0.5)
    (w**2).sum().backward()
    assert effective_perturbation(opt).norm == pytest.approx(0.5)
    with opt.perturbed():
        torch.testing.assert_close(w.detach(), torch.tensor([3.3, 4.4]))
    assert opt.metrics.grad_norm.item() == pytest.approx(10)


@pytest.mark.parametrize(
    "bad", [{"sam_default_rho": math.nan}, {"sam_rho": math.inf}, {"sam_generator": torch.ones(3)}]
)
def test_a_state_dict_that_cannot_be_loaded_changes_nothing(bad):
    w, opt = make(direction="random")
    other = opt.state_dict()
    other["param_groups"] = [other["param_groups"][0] | bad | {"lr": 7.0}]
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        opt.load_state_dict(other)
    assert opt.param_groups[0]["lr"] == 0.1
    assert opt.rho == 0.3
    opt.step(closure_of(w, opt))


class Resized(nn.Module):
    """Makes its buffer as long as the batch, in the second pass another one."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 1), 0
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        self.calls += 1
        self.seen.resize_(8 * self.calls).fill_(self.calls)
        return self.layer(x).square().mean()


def test_a_buffer_that_is_resized_in_the_second_pass_comes_back():
    model = Resized()
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    opt.step_batch(model, torch.randn(8, 3))
    assert not opt.is_perturbed
    assert model.seen.tolist() == [1.0] * 8


def test_settings_can_be_read_and_not_be_changed():
    _, opt = make(p=3.0, adaptive=0.1, weight=0.5, sync_perturbation=True)
    read = (opt.p, opt.eta, opt.ascent_steps, opt.direction, opt.weight, opt.sync_perturbation)
    assert read == (3.0, 0.1, 1, "gradient", 0.5, True)
    with pytest.raises(AttributeError):
        opt.p = 2.0


def test_a_block_in_the_loop_over_micro_batches_is_refused():
    """Only the last micro-batch would be left."""
    w, opt = make()
    opt.zero_grad()
    with pytest.raises(ValueError, match="entered again before step.. used the gradients.*To accumulate, run all"):
        for _ in range(2):
            loss_of(w).backward()
            with opt.perturbed():
                loss_of(w).backward()
    assert w.tolist() == [1.0, -2.0, 0.5]


@pytest.mark.parametrize("zero", ["opt", "none", "in place"])
def test_a_block_that_no_step_used_may_be_discarded(zero):
    """As after a step that a GradScaler skipped."""
    w, opt = make()
    for _ in range(2):
        if zero == "opt":
            opt.zero_grad()
        elif w.grad is not None:
            w.grad = None if zero == "none" else w.grad.zero_()
        loss_of(w).backward()
        with opt.perturbed():
            loss_of(w).backward()
    opt.step()


def test_gradients_zeroed_in_place_by_something_else_do_not_warn():
    """`model.zero_grad(set_to_none=False)`, DeepSpeed, a loop over parameters; warnings are errors here."""
    w, opt = make()
    start = w.detach().clone()
    for _ in range(2):
        if w.grad is not None:
            w.grad.zero_()
        loss_of(w).backward()
        with opt.perturbed():
            loss_of(w).backward()
        opt.step()
    first = start - 0.1 * references.sam_gradient(loss_of, start, 0.3)[0]
    torch.testing.assert_close(w.detach(), first - 0.1 * references.sam_gradient(loss_of, first, 0.3)[0])

    def zeroes_by_hand():
        if w.grad is not None:
            w.grad.zero_()
        loss = loss_of(w)
        loss.backward()
        return loss

    opt.step(zeroes_by_hand)


class Product(torch.nn.Module):
    """L = (a b - 1)^2 / 2, where SAM trains a and another optimizer b."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.tensor([x], dtype=torch.float64)) for x in (2.0, 3.0))
        self.unused = torch.nn.Parameter(torch.ones(1))

    def forward(self):
        return (self.a * self.b - 1).square().sum() / 2


@pytest.mark.parametrize("form", ["closure", "block"])
@pytest.mark.parametrize("zeroed", ["outside", "inside", "inside in place", "later"])
def test_another_optimizer_that_steps_on_the_sum_of_both_passes_is_warned_of(form, zeroed):
    """Here b's gradient would be 10 at w and 11.1 at w + eps; a GAN's other optimizer zeroes it before its own pass."""
    model = Product()
    opt = SAM(torch.optim.SGD([model.a], lr=0.01), rho=0.1, model=model)
    other = torch.optim.SGD([model.b, model.unused], lr=0.01)

    def run():
        opt.zero_grad()
        if "inside" in zeroed:
            other.zero_grad(set_to_none="place" not in zeroed)
        loss = model()
        loss.backward()
        return loss

    def step():
        for _ in range(2):
            other.zero_grad()
            if form == "closure":
                opt.step(run)
            else:
                run()
                with opt.perturbed():
                    run()
                opt.step()
            if zeroed == "later":
                other.zero_grad(set_to_none=False)
                model().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            other.step()

    if zeroed == "outside":
        with pytest.warns(UserWarning, match="SGD steps on the sum of the gradients of SAM's two passes") as found:
            step()
        assert len(found) == 1
    else:
        step()  # warnings are errors here


def test_gradients_that_nobody_steps_on_keep_no_optimizer_alive():
    model = Product()
    opt = SAM(torch.optim.SGD([model.a], lr=0.01), rho=0.1, model=model)
    opt.step(references.closure_of(opt, model))
    state = weakref.ref(opt._state)
    del opt
    gc.collect()
    assert state() is None


def test_two_wrappers_of_one_base_have_radii_of_their_own():
    w, opt = make()
    other = SAM(opt.base, rho=0.7)
    assert (opt.rho, other.rho) == (0.3, 0.7)
    assert [sam.state_dict()["param_groups"][0]["sam_default_rho"] for sam in (opt, other)] == [0.3, 0.7]
    start = w.detach().clone()
    opt.step(references.closure_of(opt, lambda: loss_of(w)))
    torch.testing.assert_close(w.detach(), start - 0.1 * references.sam_gradient(loss_of, start, 0.3)[0])


def test_losses_given_to_the_block_are_measured():
    w, opt = make()
    start = w.detach().clone()
    opt.zero_grad()
    loss = loss_of(w)
    loss.backward()
    with opt.perturbed(loss) as second:
        second.loss = loss_of(w)
        second.loss.backward()
    _, eps = references.sam_gradient(loss_of, start, 0.3)
    metrics = opt.metrics
    torch.testing.assert_close(metrics.loss, loss_of(start))
    torch.testing.assert_close(metrics.perturbed_loss, loss_of(start + eps))
    torch.testing.assert_close(metrics.sharpness, loss_of(start + eps) - loss_of(start))
    assert not metrics.sharpness.requires_grad
    opt.zero_grad()
    loss_of(w).backward()
    with opt.perturbed():
        loss_of(w).backward()
    assert opt.metrics.sharpness.isnan()  # nothing of the last step is left


def test_a_closure_can_tell_its_passes_apart():
    w, opt = make()
    seen = []

    def loss():
        seen.append((opt.is_perturbed, w.tolist() == [1.0, -2.0, 0.5]))
        return loss_of(w)

    opt.step(references.closure_of(opt, loss))
    assert seen == [(False, True), (True, False)]
    assert not opt.is_perturbed


def test_a_closure_passed_through_a_grad_scaler_is_refused():
    w, opt = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def closure():
        opt.zero_grad()
        loss = loss_of(w)
        scaler.scale(loss).backward()
        return loss

    closure()
    with pytest.raises(ValueError, match=r"scaler.step\(opt, closure\) would take a step with gradients of the scaled"):
        scaler.step(opt, closure)
    assert w.tolist() == [1.0, -2.0, 0.5]


class ScheduleFree(torch.optim.SGD):
    """Has two modes, as schedule-free optimizers do."""

    mode = "train"
    _step_supports_amp_scaling = True  # as fused optimizers say

    def train(self):
        self.mode = "train"

    def eval(self):
        self.mode = "eval"


def test_methods_of_the_base_are_reached_through_sam():
    w = nn.Parameter(torch.ones(2))
    opt = SAM(ScheduleFree([w], lr=0.1))
    opt.eval()
    assert opt.base.mode == opt.mode == "eval"
    opt.train()
    assert opt.base.mode == "train"
    assert not hasattr(opt, "sync_lookahead")
    assert not hasattr(opt, "_step_supports_amp_scaling")  # private: a fused base's must not reach a GradScaler
