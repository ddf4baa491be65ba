"""What real training scripts do: each of these once trained something else than SAM, or failed without saying why."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import references
from flatmin import SAM
from quartic import closure_of, loss_of, make

# Accumulation.


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


# Noise.


def test_the_block_replays_the_noise_of_the_first_pass_and_leaves_the_data_alone():
    torch.manual_seed(0)
    w = nn.Parameter(torch.ones(1000))
    opt = SAM(torch.optim.SGD([w], lr=0.1), rho=0.1)
    batches, masks = [], []
    for _ in range(3):
        batches.append(torch.randn(2))  # a loader that draws from torch's generator
        opt.zero_grad()
        first = nn.functional.dropout(w, 0.5)
        first.sum().backward()
        after_first_pass = torch.get_rng_state()
        with opt.perturbed():
            second = nn.functional.dropout(w, 0.5)
            second.sum().backward()
        assert torch.equal(torch.get_rng_state(), after_first_pass)
        opt.step()
        assert torch.equal(first == 0, second == 0)
        masks.append(first == 0)
    assert not torch.equal(batches[0], batches[1])
    assert not torch.equal(masks[0], masks[1])


def test_an_exception_in_the_block_leaves_the_generator_where_the_first_pass_did():
    w, opt = make()
    opt.zero_grad()
    loss_of(w).backward()
    torch.rand(3)
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError), opt.perturbed():
        torch.rand(5)
        raise RuntimeError
    assert torch.equal(torch.get_rng_state(), state)


# Metrics of the two-pass form.


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

    def closure():
        seen.append((opt.is_perturbed, w.tolist() == [1.0, -2.0, 0.5]))
        opt.zero_grad()
        loss = loss_of(w)
        loss.backward()
        return loss

    opt.step(closure)
    assert seen == [(False, True), (True, False)]
    assert not opt.is_perturbed


# Steps that are no SAM steps.


def test_a_bare_step_at_a_learning_rate_of_zero_is_refused_too():
    """Warm-up starts there: thirty plain steps went unnoticed."""
    w, opt = make()
    opt.param_groups[0]["lr"] = 0.0
    loss_of(w).backward()
    with pytest.raises(TypeError, match="needs a closure, or a pass at the perturbed weights"):
        opt.step()


def test_checkpoints_of_torch_distributed_may_initialize_the_optimizer():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = nn.Linear(2, 1)
    opt = SAM(torch.optim.AdamW(model.parameters(), lr=0.1), rho=0.05)
    state = get_optimizer_state_dict(model, opt)
    assert "exp_avg" in state["state"]["weight"]
    assert state["param_groups"][0]["sam_default_rho"] == 0.05
    assert opt.needs_perturbed_pass  # that was no step


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


# Buffers.


def test_a_layer_replaced_after_sam_was_built_is_seen():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Identity())
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5, model=model)
    model[1] = nn.BatchNorm1d(4)
    x = torch.randn(6, 3)
    other = copy.deepcopy(model)

    def closure():
        opt.zero_grad()
        loss = model(x).square().mean() + model[0].weight.square().sum()
        loss.backward()
        return loss

    opt.step(closure)
    other(x)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), other.buffers(), strict=True))


# The base optimizer's own.


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


def test_global_hooks_run_once_per_step_and_own_hooks_too():
    w, opt = make()
    calls = []
    handles = [
        register_optimizer_step_pre_hook(lambda o, *_: calls.append(("global before", type(o).__name__))),
        register_optimizer_step_post_hook(lambda o, *_: calls.append(("global after", type(o).__name__))),
        opt.register_step_pre_hook(lambda o, *_: calls.append(("before", type(o).__name__))),
        opt.register_step_post_hook(lambda o, *_: calls.append(("after", type(o).__name__))),
    ]
    try:
        opt.step(closure_of(w, opt))
    finally:
        for handle in handles:
            handle.remove()
    assert calls == [("before", "SAM"), ("global before", "SGD"), ("global after", "SGD"), ("after", "SAM")]


# People who come from other libraries.


def test_calls_of_other_libraries_say_what_to_write():
    model = nn.Linear(2, 1)
    one_line = r"Write SAM\(torch.optim.SGD\(model.parameters\(\), lr=0.1, momentum=0.9\), rho=0.05, model=model\)"
    with pytest.raises(TypeError, match=one_line):
        SAM(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError, match=one_line):
        SAM(model.parameters(), base_optimizer=torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError, match=one_line):
        SAM(model.parameters(), rho=0.05)
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1))
    for name in ("first_step", "second_step"):
        with pytest.raises(AttributeError, match=one_line):
            getattr(opt, name)


def test_the_signature_names_the_arguments():
    import inspect

    assert "rho" in inspect.signature(SAM).parameters
