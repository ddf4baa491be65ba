"""SAM in the loops people have: AMP, clipping, compilation, schedulers, hooks, trainers' wrappers."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import references
from flatmin import SAM, suggest_rho


def make(base=torch.optim.SGD, dtype=torch.float64, lr=0.1, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    opt = SAM(base(model.parameters(), lr=lr), **({"rho": 0.3} | settings))
    return model, opt


def batch(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 4, generator=generator).to(dtype), torch.randn(16, 1, generator=generator).to(dtype)


def loss_of(model, data):
    return ((model(data[0]) - data[1]) ** 2).mean()


def closure_of(model, opt, data):
    return references.closure_of(opt, lambda: loss_of(model, data))


def weights(model):
    return references.flat(model.parameters())


def test_a_grad_scaler_gives_the_same_step_and_needs_no_unscaling_in_pass_1():
    (plain, opt_plain), (scaled, opt_scaled) = make(dtype=torch.float32), make(dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    data = batch(torch.float32)
    for _ in range(3):
        opt_plain.step(closure_of(plain, opt_plain, data))
        opt_scaled.zero_grad()
        scaler.scale(loss_of(scaled, data)).backward()
        with opt_scaled.perturbed():
            opt_scaled.zero_grad()
            scaler.scale(loss_of(scaled, data)).backward()
        scaler.unscale_(opt_scaled)
        nn.utils.clip_grad_norm_(scaled.parameters(), 1e6)
        scaler.step(opt_scaled)
        scaler.update()
    torch.testing.assert_close(weights(plain), weights(scaled), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("overflowing_pass", [1, 2])
def test_a_step_that_the_scaler_skips_changes_nothing_and_leaves_no_permission(overflowing_pass):
    model, opt = make(dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    data, before = batch(torch.float32), weights(model)

    def backward(overflow):
        loss = loss_of(model, data)
        scaler.scale(loss * math.inf if overflow else loss).backward()

    backward(overflowing_pass == 1)
    with opt.perturbed():
        if overflowing_pass == 1:
            assert torch.equal(weights(model), before), "an overflow gives no perturbation"
        opt.zero_grad()
        backward(True)
    scaler.step(opt)
    scaler.update()
    assert torch.equal(weights(model), before)
    assert scaler.get_scale() == 4.0
    opt.zero_grad()
    backward(False)
    with pytest.raises(TypeError, match="needs a closure"):
        scaler.step(opt)


def test_unscaling_before_the_block_is_an_error_and_the_next_step_is_none():
    """A scaler unscales once a step, so the second pass's gradients would be 1024 times too large."""
    (plain, opt_plain), (scaled, opt_scaled) = make(dtype=torch.float32), make(dtype=torch.float32)
    data = batch(torch.float32)
    for is_wrong in (True, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        opt_scaled.zero_grad()
        scaler.scale(loss_of(scaled, data)).backward()
        if is_wrong:
            scaler.unscale_(opt_scaled)
            nn.utils.clip_grad_norm_(scaled.parameters(), 1.0)
            with pytest.raises(ValueError, match=r"unscale_\(opt\) was called before"), opt_scaled.perturbed():
                pass
    with opt_scaled.perturbed():
        scaler.scale(loss_of(scaled, data)).backward()
    scaler.step(opt_scaled)  # unscales by itself
    scaler.update()
    opt_plain.step(closure_of(plain, opt_plain, data))
    torch.testing.assert_close(weights(plain), weights(scaled), rtol=1e-5, atol=1e-7)


def test_gradients_unscaled_for_a_step_that_was_skipped_may_be_zeroed_in_place():
    model, opt = make(dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (math.inf, 1.0):
        model.zero_grad(set_to_none=False)
        scaler.scale(loss_of(model, batch(torch.float32))).backward()
        with opt.perturbed():
            scaler.scale(loss_of(model, batch(torch.float32)) * factor).backward()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()


def test_a_step_at_radius_0_may_be_unscaled_and_the_next_one_is_perturbed_again():
    model, opt = make(dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    opt.rho = 0.0
    for rho in (0.1, 0.1):
        scaler.scale(loss_of(model, batch(torch.float32))).backward()
        if opt.needs_perturbed_pass:
            with opt.perturbed():
                scaler.scale(loss_of(model, batch(torch.float32))).backward()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        model.zero_grad()
        opt.rho = rho


def test_clipping_applies_to_the_second_gradient():
    model, opt = make()
    data, w = batch(), weights(model)
    loss_of(model, data).backward()
    with opt.perturbed():
        loss_of(model, data).backward()
    g = references.flat(p.grad for p in model.parameters())
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    opt.step()
    torch.testing.assert_close(weights(model), w - 0.1 * 0.01 * g / (g.norm() + 1e-6))


def test_clipping_in_a_hook_of_the_base_optimizer_works_with_closures():
    (one, opt_one), (two, opt_two) = make(), make()

    def clip(*_):
        nn.utils.clip_grad_norm_(one.parameters(), 0.01)

    opt_one.base.register_step_pre_hook(clip)
    opt_one.step(closure_of(one, opt_one, batch()))
    loss_of(two, batch()).backward()
    with opt_two.perturbed():
        loss_of(two, batch()).backward()
    nn.utils.clip_grad_norm_(two.parameters(), 0.01)
    opt_two.step()
    assert torch.equal(weights(one), weights(two))


def test_bf16_autocast_gives_the_step_of_its_own_gradients():
    model, opt = make(dtype=torch.float32)
    data = batch(torch.float32)

    def closure():
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, data)
        loss.backward()
        return loss

    exact, opt_exact = make(dtype=torch.float32)
    before = weights(model)
    opt.step(closure)
    opt_exact.step(closure_of(exact, opt_exact, data))
    moved, expected = weights(model) - before, weights(exact) - before
    assert torch.nn.functional.cosine_similarity(moved, expected, dim=0) > 0.99
    assert opt.metrics.perturbation_norm.item() == pytest.approx(0.3)


@pytest.mark.parametrize("way", ["closure", "two passes", "part"])
def test_autocast_around_the_whole_step_is_autocast_around_each_pass(way):
    """Autocast keeps its casts of the weights until its block ends; those of w must not stand for w + eps."""

    def step(outer):
        model, opt = make(dtype=torch.float32, rho=1.0)
        x, y = batch(torch.float32)

        def loss(x=x, y=y):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return loss_of(model, (x, y))

        with torch.autocast("cpu", dtype=torch.bfloat16) if outer else nullcontext():
            if way == "closure":
                opt.step(references.closure_of(opt, loss))
            elif way == "part":
                opt.step_batch(loss, (x, y), part=1 / 4)
            else:
                loss().backward()
                with opt.perturbed():
                    loss().backward()
                opt.step()
        return weights(model)

    assert torch.equal(step(outer=True), step(outer=False))


def test_the_rise_of_the_loss_is_measured_within_autocast():
    model, opt = make(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = suggest_rho(opt, lambda x, y: loss_of(model, (x, y)), [batch(torch.float32)])
        (rise,) = found.measure([4 * found.rho]).rises[-1:]
    assert rise > 0.2 * found.loss


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")
def test_a_compiled_model_takes_the_same_steps_without_recompiling():
    torch._dynamo.reset()
    (plain, opt_plain), (model, opt) = make(dtype=torch.float32), make(dtype=torch.float32)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    opt.model = compiled
    for step in range(3):
        data = batch(torch.float32, seed=step)
        opt_plain.step(closure_of(plain, opt_plain, data))
        opt.step(closure_of(compiled, opt, data))
    torch.testing.assert_close(weights(plain), weights(model), rtol=1e-6, atol=1e-7)
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore")  # dynamo's and inductor's own
@pytest.mark.parametrize(
    ("backend", "way"),
    [("aot_eager", "closure"), ("aot_eager", "two passes"), ("aot_eager", "batch"), ("inductor", "batch")],
)
def test_a_compiled_train_step_is_the_same_step(backend, way):
    def train(compiled):
        torch._dynamo.reset()
        model, opt = make(dtype=torch.float32)
        opt.model = model

        def train_step(data):
            if way == "closure":
                opt.step(closure_of(model, opt, data))
            elif way == "batch":
                opt.step_batch(lambda x, y: loss_of(model, (x, y)), data, part=0.5)
            else:
                opt.zero_grad()
                loss_of(model, data).backward()
                with opt.perturbed():
                    loss_of(model, data).backward()
                opt.step()

        step = torch.compile(train_step, backend=backend) if compiled else train_step
        for seed in range(2):
            step(batch(torch.float32, seed=seed))
        return weights(model)

    torch.testing.assert_close(train(True), train(False))


@pytest.mark.parametrize("holder", ["sam", "base"])
@pytest.mark.parametrize("when", ["before the load", "after the load"])
def test_a_scheduler_may_hold_either_optimizer_before_and_after_a_load(holder, when):
    model, opt = make()
    held = opt if holder == "sam" else opt.base
    saved = opt.state_dict()
    if when == "after the load":
        opt.load_state_dict(saved)
    scheduler = torch.optim.lr_scheduler.StepLR(held, step_size=1, gamma=0.5)
    if when == "before the load":
        opt.load_state_dict(saved)
    w = weights(model)
    opt.step(closure_of(model, opt, batch()))
    scheduler.step()
    assert opt.param_groups[0]["lr"] == opt.base.param_groups[0]["lr"] == pytest.approx(0.05)
    before = weights(model)
    opt.step(closure_of(model, opt, batch()))
    g = references.flat(p.grad for p in model.parameters())
    torch.testing.assert_close(weights(model), before - 0.05 * g)
    assert not torch.equal(w, before)


def test_schedulers_that_look_at_defaults_work():
    model, opt = make(torch.optim.AdamW)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=5)
    for _ in range(4):
        opt.step(closure_of(model, opt, batch()))
        scheduler.step()


def test_rho_can_be_scheduled_for_all_or_for_a_group():
    model, opt = make()
    opt.rho = 0.7
    opt.step(closure_of(model, opt, batch()))
    assert opt.metrics.perturbation_norm.item() == pytest.approx(0.7)
    opt.param_groups[0]["sam_rho"] = 0.2
    opt.step(closure_of(model, opt, batch()))
    assert opt.metrics.perturbation_norm.item() == pytest.approx(0.2)


def test_a_parameter_group_added_later_is_perturbed_and_trained():
    model, opt = make()
    extra = nn.Parameter(torch.ones(2, dtype=torch.float64))
    opt.add_param_group({"params": [extra], "lr": 0.5})
    assert opt.base.param_groups[1]["params"] == [extra]
    seen = []

    def loss():
        seen.append(extra.detach().clone())
        return loss_of(model, batch()) + (extra**2).sum()

    opt.step(references.closure_of(opt, loss))
    assert not torch.equal(seen[0], seen[1])
    torch.testing.assert_close(extra.detach(), seen[0] - 0.5 * 2 * seen[1])


def test_hooks_of_both_and_global_ones_run_once_a_step():
    model, opt = make()
    calls = []

    def note(name):
        return lambda optimizer, *_: calls.append((name, type(optimizer).__name__))

    handles = [
        register_optimizer_step_pre_hook(note("global pre")),
        register_optimizer_step_post_hook(note("global post")),
    ]
    for optimizer in (opt, opt.base):
        optimizer.register_step_pre_hook(note("pre"))
        optimizer.register_step_post_hook(note("post"))
    opt.register_state_dict_pre_hook(note("save"))
    opt.register_state_dict_post_hook(lambda _, state: state | {"extra": 1})
    opt.register_load_state_dict_pre_hook(note("load"))
    opt.register_load_state_dict_post_hook(note("loaded"))
    try:
        opt.step(closure_of(model, opt, batch()))
    finally:
        for handle in handles:
            handle.remove()
    state = opt.state_dict()
    assert state["extra"] == 1
    opt.load_state_dict(state)
    of_base = [(name, "SGD") for name in ("global pre", "pre", "post", "global post")]
    assert sorted(calls[1:5]) == sorted(of_base)
    assert [calls[0], *calls[5:]] == [(name, "SAM") for name in ("pre", "post", "save", "load", "loaded")]


def test_a_trainers_do_nothing_closure_after_a_second_pass_is_called_once_and_ignored():
    (one, opt_one), (two, opt_two) = make(), make()
    opt_one.step(closure_of(one, opt_one, batch()))
    loss_of(two, batch()).backward()
    with opt_two.perturbed():
        loss_of(two, batch()).backward()
    calls = []
    opt_two.step(lambda: calls.append(1))
    assert calls == [1]
    torch.testing.assert_close(weights(one), weights(two))


@pytest.mark.filterwarnings("ignore:model has none of the parameters")
def test_a_wrapper_that_subclasses_the_optimizer_on_the_fly_sees_and_sets_the_same_state():
    """As Lightning's does: the attributes are copied, the class is a new one."""
    model, opt = make()

    class Wrapper:
        def __init__(self, optimizer):
            self.__dict__ = {k: v for k, v in optimizer.__dict__.items() if k != "step"}
            self.__class__ = type("Wrapped", (self.__class__, optimizer.__class__), {})
            self.inner = optimizer

    wrapped, norm = Wrapper(opt), nn.BatchNorm1d(2)
    wrapped.rho = 0.7
    wrapped.model = norm
    loss_of(model, batch()).backward()
    before = weights(model)
    with wrapped.perturbed():
        loss_of(model, batch()).backward()
    opt.step()
    assert not torch.equal(before, weights(model))
    assert opt.metrics is wrapped.metrics
    assert opt.metrics.perturbation_norm.item() == pytest.approx(0.7)
    assert opt.model is norm


def test_a_float_loss_is_accepted():
    model, opt = make()
    inner = closure_of(model, opt, batch())
    assert opt.step(lambda: inner().item()).item() > 0


def test_the_first_loss_is_safe_from_a_pass_that_overwrites_its_memory():
    """CUDA graphs write each loss to the same place."""
    w = nn.Parameter(torch.tensor([1.0]))
    opt = SAM(torch.optim.SGD([w], lr=0.0), rho=0.5)
    place = torch.zeros(())

    def closure():
        opt.zero_grad()
        loss = (w**2).sum()
        loss.backward()
        return place.copy_(loss.detach())

    assert opt.step(closure).item() == 1.0
    assert opt.metrics.loss.item() == 1.0
    assert opt.metrics.perturbed_loss.item() == 2.25


def test_steps_work_where_gradients_are_switched_off():
    model, opt = make()
    before = weights(model)
    with torch.no_grad():
        opt.step(closure_of(model, opt, batch()))
    assert not torch.equal(before, weights(model))


def test_repr_shows_the_settings_and_the_base():
    _, opt = make(adaptive=True, ascent_steps=2)
    assert repr(opt).startswith("SAM(rho=0.3, p=2.0, adaptive=0.01, ascent_steps=2, base=SGD (")
