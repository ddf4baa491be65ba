"""Functions for the direction and the combination: closed forms, every way to step, checkpoints, bad functions."""

import copy
import math
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

from device_sync import NoDeviceSync
from flatmin import SAM, suggest_rho
from references import eq2, flat, gradient, scaled_eq2

LR = 0.1


def make(groups=None, base=None, **settings):
    """Two tensors, so that a norm per tensor would fail; and one that the loss does not use, one that is frozen."""
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(3, 2), torch.randn(4), torch.randn(2), torch.randn(2)]).double()
    model[3].requires_grad_(False)
    base = base or (lambda params: torch.optim.SGD(params, lr=LR))
    parameters = list(model) if groups is None else groups(model)
    return model, SAM(base(parameters), **({"rho": 0.3} | settings))


def loss_of(w, x):
    """A loss of the first ten numbers of a flat vector."""
    return ((w[:10] * x).sum(dim=1) ** 2).mean() + (w[:10] ** 4).sum()


def batch(n=8, seed=1):
    return torch.randn(n, 10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def joined(model):
    return torch.cat([model[0].flatten() * 1, model[1] * 1])  # the gradient of cat would be views of one tensor


def pass_on(model, opt, x):
    def closure():
        opt.zero_grad()
        loss = loss_of(joined(model), x)
        loss.backward()
        return loss

    return closure


def weights(model):
    return flat(model[:2])


def closure_step(model, opt, x):
    opt.step(pass_on(model, opt, x))


def two_passes(model, opt, x):
    pass_on(model, opt, x)()
    with opt.perturbed():
        pass_on(model, opt, x)()
    opt.step()


def micro_batches(model, opt, x):
    opt.step([pass_on(model, opt, x[:3]), pass_on(model, opt, x[3:])], weights=[3, 5])


def on_a_part(model, opt, x):
    opt.step_batch(lambda x: loss_of(joined(model), x), x, part=0.25)


WAYS = [closure_step, two_passes, micro_batches, on_a_part]


def train(way, num_steps=3, **settings):
    model, opt = make(**settings)
    for seed in range(num_steps):
        way(model, opt, batch(seed=seed))
    return weights(model)


class Average:
    """The gradient minus its moving average: a direction with state."""

    def __init__(self, decay=0.9):
        self.decay, self.average = decay, []

    def __call__(self, grads):
        self.average = self.average or [torch.zeros_like(g) for g in grads]
        torch._foreach_lerp_(self.average, grads, 1 - self.decay)
        return torch._foreach_sub(grads, self.average)

    def state_dict(self):
        return {"average": self.average}

    def load_state_dict(self, state):
        self.average = state["average"]


def surrogate_gap(grads, perturbed, alpha=0.4):
    """GSAM: the perturbed gradient minus alpha times the part of the gradient that is orthogonal to it."""
    along = sum((g * q).sum() for g, q in zip(grads, perturbed, strict=True))
    along /= sum((q * q).sum() for q in perturbed)
    return [q - alpha * (g - along * q) for g, q in zip(grads, perturbed, strict=True)]


# What the functions mean.


@pytest.mark.parametrize("way", WAYS)
def test_functions_that_change_nothing_change_no_bit(way):
    plain = train(way)
    assert torch.equal(plain, train(way, direction=lambda grads: grads))
    assert torch.equal(plain, train(way, combine=lambda grads, perturbed: perturbed))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("weight", [0.5, 2.0])
def test_a_linear_combination_is_the_weight(way, weight):
    def combine(grads, perturbed):
        factor = weight * 0.25 if way is on_a_part else weight  # weight=None divides by the part by itself
        return [g + factor * (q - g) for g, q in zip(grads, perturbed, strict=True)]

    torch.testing.assert_close(train(way, combine=combine), train(way, weight=weight), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 4.0, math.inf])
@pytest.mark.parametrize("eta", [None, 0.1])
@pytest.mark.parametrize("own_radius", [None, 0.7])
@pytest.mark.parametrize("maximize", [False, True])
def test_a_direction_is_scaled_to_the_neighborhood_as_a_gradient_is(p, eta, own_radius, maximize):
    def groups(model):
        own = {} if own_radius is None else {"sam_rho": own_radius}
        return [{"params": model[0]}, {"params": [*model[1:]], **own}]

    model, opt = make(
        groups,
        base=lambda params: torch.optim.SGD(params, lr=LR, maximize=maximize),
        direction=lambda grads: [g.sign() * g.abs().sqrt() for g in grads],
        p=p,
        adaptive=False if eta is None else eta,
    )
    w, x = weights(model), batch()
    g = gradient(lambda w: loss_of(w, x), w)
    d = g.sign() * g.abs().sqrt()
    scale = torch.tensor([0.3] * 6 + [own_radius or 0.3] * 4, dtype=torch.float64)
    scale = scale if eta is None else scale * (w.abs() + eta)
    eps = scaled_eq2(d, scale, p) * (-1 if maximize else 1)
    opt.step(pass_on(model, opt, x))
    expected = gradient(lambda w: loss_of(w, x), w + eps)
    torch.testing.assert_close(weights(model), w + (LR if maximize else -LR) * expected, rtol=1e-10, atol=1e-12)


def test_each_ascent_step_and_each_closure_calls_the_direction():
    calls = []

    def direction(grads):
        calls.append([g.clone() for g in grads])
        return grads

    model, opt = make(direction=direction, ascent_steps=3)
    opt.step(pass_on(model, opt, batch()))
    assert len(calls) == 3
    assert not torch.equal(calls[0][0], calls[1][0])
    model, opt = make(direction=direction)
    calls.clear()
    opt.step([pass_on(model, opt, batch(seed=seed)) for seed in range(4)])
    assert len(calls) == 4


def test_several_ascent_steps_use_the_direction_of_each_gradient():
    """With the sign as direction and p = inf, a step of SAM and one of this are the same: dual_inf is the sign."""
    sign = {"direction": lambda grads: [g.sign() for g in grads]}
    ascent = {"ascent_steps": 3, "p": math.inf, "rho": 0.05}
    torch.testing.assert_close(train(closure_step, **ascent, **sign), train(closure_step, **ascent))


def test_lists_follow_the_documented_order_and_missing_gradients_are_zeros():
    seen = {}

    def direction(grads):
        seen["direction"] = [g.clone() for g in grads]
        return grads

    def combine(grads, perturbed):
        seen["combine"] = [g.clone() for g in grads]
        return [q + 1 for q in perturbed]

    def groups(model):
        return [{"params": [model[1], model[3]], "sam_rho": 0.0}, {"params": [model[2], model[0]]}]

    model, opt = make(groups, direction=direction, combine=combine)
    assert [id(p) for p in opt.perturbed_parameters] == [id(model[2]), id(model[0])]
    before = weights(model)
    opt.step(pass_on(model, opt, batch()))
    g = gradient(lambda w: loss_of(w, batch()), before)
    assert seen["direction"][0].eq(0).all()
    torch.testing.assert_close(seen["direction"][1].flatten(), g[:6])
    torch.testing.assert_close(flat(seen["combine"]), torch.cat([g[6:], torch.zeros(2), g[:6]]))
    assert model[2].grad is None, "no pass used it"
    eps = torch.cat([eq2(g[:6], 0.3, 2.0), torch.zeros(4)])
    expected = gradient(lambda w: loss_of(w, batch()), before + eps) + 1
    torch.testing.assert_close(weights(model), before - LR * expected)


def test_perturbed_parameters_are_there_once_and_none_at_radius_0():
    w = nn.Parameter(torch.ones(2))
    with pytest.warns(UserWarning, match="duplicate"):
        opt = SAM(torch.optim.SGD([w, w], lr=LR), rho=0.1)
    assert [id(p) for p in opt.perturbed_parameters] == [id(w)]
    opt.rho = 0.0
    assert opt.perturbed_parameters == []


def test_a_combination_on_a_part_keeps_its_strength():
    """g_batch + combined_part - g_part."""
    x = batch()
    model, opt = make(combine=surrogate_gap)
    w = weights(model)
    on_a_part(model, opt, x)
    g, part = (gradient(lambda w, x=x: loss_of(w, x), w) for x in (x, x[:2]))
    at_eps = gradient(lambda w: loss_of(w, x[:2]), w + eq2(part, 0.3, 2.0))
    (combined,) = surrogate_gap([part], [at_eps])
    torch.testing.assert_close(weights(model), w - LR * (g + combined - part))


def test_a_random_direction_runs_the_first_pass_for_the_combination():
    """A combination that returns the gradient at w is the base optimizer."""
    settings = {"direction": "random", "generator": torch.Generator().manual_seed(0), "combine": lambda g, q: g}
    torch.testing.assert_close(train(closure_step, **settings), train(closure_step, rho=0.0), rtol=0, atol=0)
    _, opt = make(**settings)
    with pytest.raises(ValueError, match="no gradients"), opt.perturbed():
        pass


def test_a_plain_step_calls_no_function():
    def fail(*args):
        raise AssertionError

    functions = {"direction": fail, "combine": fail}
    assert torch.equal(train(closure_step, rho=0.0, **functions), train(closure_step, rho=0.0))


@pytest.mark.parametrize("settings", [{"direction": Average()}, {"combine": surrogate_gap}])
def test_a_gradient_scaler_changes_nothing(settings):
    """Both functions see gradients times the same factor, and eps does not depend on it."""
    results = []
    for scale in (None, 256.0):
        model, opt = make(**copy.deepcopy(settings))
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for seed in range(4):
            opt.zero_grad()
            for p in model:
                p.grad = None
            scaler.scale(loss_of(joined(model), batch(seed=seed))).backward()
            with opt.perturbed():
                scaler.scale(loss_of(joined(model), batch(seed=seed))).backward()
            scaler.step(opt)
            scaler.update()
        results.append(weights(model))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    assert not torch.equal(results[0], train(two_passes, num_steps=4))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "function", [{"direction": lambda g: [x * 2 for x in g]}, {"combine": surrogate_gap}], ids=["direction", "combine"]
)
def test_no_step_but_the_first_waits_for_the_device(way, function):
    model, opt = make(**function)
    way(model, opt, batch())
    with NoDeviceSync():
        way(model, opt, batch())


def test_the_gradient_norm_is_unknown_with_a_function():
    model, opt = make(direction=lambda grads: [2 * g for g in grads])
    closure_step(model, opt, batch())
    assert opt.metrics.grad_norm.isnan()
    assert opt.metrics.perturbation_norm == pytest.approx(0.3)


def test_complex_and_sparse_gradients_reach_the_function_as_dense_ones():
    seen = []

    def direction(grads):
        seen.extend((g.dtype, g.layout) for g in grads)
        return grads

    table, z = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(2, dtype=torch.complex64))
    opt = SAM(torch.optim.SGD([table, z], lr=LR), rho=1.0, direction=direction)
    rows = nn.functional.embedding(torch.tensor([1, 1]), table, sparse=True)
    (rows.sum() + z.abs().sum()).backward()
    assert table.grad.is_sparse
    with opt.perturbed():
        moved = torch.cat([(table - 1).flatten(), (z - 1).abs()]).detach()
        nn.functional.embedding(torch.tensor([1, 1]), table, sparse=True).sum().backward()
    assert seen == [(torch.float32, torch.strided), (torch.complex64, torch.strided)]
    assert moved.norm() == pytest.approx(1.0)


# The radius.


def test_a_suggested_radius_is_for_the_direction_and_leaves_the_function_as_it_was():
    direction = Average(decay=0.5)
    model, opt = make(direction=direction)
    for seed in range(2):
        closure_step(model, opt, batch(seed=seed))
    w, x = weights(model), batch(seed=7)
    average = flat(direction.average[:2]).clone()
    found = suggest_rho(opt, lambda x: loss_of(joined(model), x), [x])
    g = gradient(lambda w: loss_of(w, x), w)
    d = g - (0.5 * average + 0.5 * g)
    rise = (g * d).sum() / d.norm()
    assert found.rho == pytest.approx(float(0.1 * loss_of(w, x) / rise))
    assert found.grad_norm == pytest.approx(float(g.norm()))
    assert torch.equal(flat(direction.average[:2]), average)
    curve = found.measure([0.2])
    assert curve.rises[0] == pytest.approx(float(loss_of(w + 0.2 * d / d.norm(), x) - loss_of(w, x)))


def test_a_direction_that_points_downhill_has_no_suggested_radius():
    model, opt = make(direction=lambda grads: [-g for g in grads])
    with pytest.raises(ValueError, match="points downhill"):
        suggest_rho(opt, lambda x: loss_of(joined(model), x), [batch()])


# Checkpoints.


@pytest.mark.parametrize("how", ["state dict", "deepcopy", "pickle"])
def test_a_function_with_state_goes_on_in_lockstep(how, tmp_path):
    model, opt = make(direction=Average(), base=lambda params: torch.optim.SGD(params, lr=LR, momentum=0.9))
    for seed in range(3):
        closure_step(model, opt, batch(seed=seed))
    if how == "state dict":
        torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, tmp_path / "checkpoint.pt")
        other, other_opt = make(direction=Average(), base=lambda params: torch.optim.SGD(params, lr=LR, momentum=0.9))
        closure_step(other, other_opt, batch(seed=9))
        saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        other.load_state_dict(saved["model"])
        other_opt.load_state_dict(saved["opt"])
        first = saved["opt"]["param_groups"][0]["sam_direction"]["average"][0].clone()
    else:
        copied = copy.deepcopy((model, opt)) if how == "deepcopy" else pickle.loads(pickle.dumps((model, opt)))
        other, other_opt = copied
    for seed in range(3, 6):
        closure_step(model, opt, batch(seed=seed))
        closure_step(other, other_opt, batch(seed=seed))
        assert torch.equal(weights(model), weights(other))
    if how == "state dict":
        assert torch.equal(saved["opt"]["param_groups"][0]["sam_direction"]["average"][0], first), "it is a copy"
        assert "sam_direction" not in other_opt.param_groups[0]


def test_a_checkpoint_without_the_functions_state_leaves_it_alone_and_the_other_way_round():
    model, opt = make(direction=Average())
    closure_step(model, opt, batch())
    before = opt.direction.average[0].clone()
    opt.load_state_dict(opt.base.state_dict())
    assert torch.equal(opt.direction.average[0], before)
    _, plain = make()
    plain.load_state_dict(opt.state_dict())
    assert "sam_direction" not in plain.state_dict()["param_groups"][0]


@pytest.mark.parametrize("fails", ["function", "base"])
def test_a_failed_load_changes_nothing(fails):
    model, opt = make(direction=Average())
    closure_step(model, opt, batch())
    before = opt.direction.average[0].clone()
    state = copy.deepcopy(opt.state_dict())
    state["param_groups"][0]["lr"] = 7.0
    state["param_groups"][0]["sam_direction"]["average"][0].zero_()
    if fails == "function":
        del state["param_groups"][0]["sam_direction"]["average"]
    else:
        state["param_groups"][0]["params"].pop()
    with pytest.raises((KeyError, ValueError)):
        opt.load_state_dict(state)
    assert torch.equal(opt.direction.average[0], before)
    assert opt.param_groups[0]["lr"] == LR


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_a_distributed_checkpoint_goes_on_in_lockstep(momentum, tmp_path):
    def make_one(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(10, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        base = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
        return model, SAM(base, rho=0.3, direction=Average())

    def step(model, opt, seed):
        def closure():
            opt.zero_grad()
            loss = model(batch(seed=seed)).square().mean()
            loss.backward()
            return loss

        opt.step(closure)

    model, opt = make_one(0)
    for seed in range(2):
        step(model, opt, seed)
    opt.zero_grad()
    average = opt.direction.average[0].clone()
    model_state, opt_state = get_state_dict(model, opt)
    dcp.save({"model": model_state, "opt": opt_state}, checkpoint_id=tmp_path)
    assert torch.equal(opt.direction.average[0], average), "saving changes nothing"
    other, other_opt = make_one(1)
    model_state, opt_state = get_state_dict(other, other_opt)  # creates the state that is loaded into
    state = {"model": model_state, "opt": opt_state}
    dcp.load(state, checkpoint_id=tmp_path)
    set_state_dict(other, other_opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
    for seed in range(2, 4):
        step(model, opt, seed)
        step(other, other_opt, seed)
        assert torch.equal(flat(model.parameters()), flat(other.parameters()))
    with pytest.raises(ValueError, match="cannot hold the state of direction"):
        get_optimizer_state_dict(model, opt, options=StateDictOptions(flatten_optimizer_state_dict=True))


# Bad functions and settings.


def in_place(grads):
    grads[1].mul_(2)
    return grads


BAD = [
    (lambda grads: grads[:-1], ValueError, "returned 2 tensors for 3 gradients"),
    (lambda grads: [*grads[:2], grads[2][:1]], ValueError, r"shape \(1,\), .* for parameter 2, .* shape \(2,\)"),
    (lambda grads: [grads[0], grads[1].float(), grads[2]], ValueError, "float32 on cpu for parameter 1, .*float64"),
    (lambda grads: [grads[0], grads[1].to_sparse(), grads[2]], ValueError, "sparse_coo for parameter 1"),
    (lambda grads: [grads[0], None, grads[2]], TypeError, "a NoneType, not a tensor, for parameter 1"),
    (lambda grads: [grads[0], grads[1] / 0, grads[2]], ValueError, "parameter 1 that is not finite"),
    (lambda grads: [g / g.norm() for g in grads], ValueError, "parameter 2 that is not finite"),
    (lambda grads: (g for g in grads), TypeError, "must return a list of 3 tensors, .* got a generator"),
    (lambda grads: grads[0], TypeError, "got a Tensor"),
    (lambda grads: None, TypeError, "got None"),
    (in_place, ValueError, "changed the gradient of parameter 1 in place"),
]


@pytest.mark.parametrize("name", ["direction", "combine"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("function", "error", "message"), BAD)
def test_a_bad_function_is_named_with_its_parameter_and_the_weights_come_back(name, way, function, error, message):
    bad = function if name == "direction" else lambda grads, perturbed: function(perturbed)
    model, opt = make(**{name: bad})
    before = weights(model)
    with pytest.raises(error, match=f"{name}.*{message}"):
        way(model, opt, batch())
    assert torch.equal(weights(model), before)
    assert not opt.is_perturbed


def test_a_direction_that_is_not_finite_later_gives_no_perturbation():
    factors = iter([1.0, math.nan])
    model, opt = make(direction=lambda grads: [g * factor for factor in [next(factors)] for g in grads])
    closure_step(model, opt, batch())
    w = weights(model)
    closure_step(model, opt, batch())
    assert opt.metrics.perturbation_norm == 0
    torch.testing.assert_close(weights(model), w - LR * gradient(lambda w: loss_of(w, batch()), w))


def test_gradients_that_are_not_finite_are_not_the_functions_fault():
    model, opt = make(direction=lambda grads: [2 * g for g in grads])
    closure_step(model, opt, batch() * math.inf)
    assert opt.metrics.perturbation_norm == 0


SETTINGS = [
    ({"combine": surrogate_gap, "weight": 1.0}, ValueError, "combine and weight=1.0"),
    ({"combine": surrogate_gap, "direction": "momentum"}, ValueError, "combine=.*does not go with it"),
    ({"combine": "gsam"}, TypeError, "combine must be a function"),
    ({"combine": Average}, TypeError, "not the class"),
    ({"direction": Average}, TypeError, "Pass an instance"),
    ({"direction": "friendly"}, ValueError, "or a function"),
]


@pytest.mark.parametrize(("settings", "error", "message"), SETTINGS)
def test_settings_that_do_not_go_together(settings, error, message):
    with pytest.raises(error, match=message):
        make(**settings)


def test_another_ascent_closure_goes_with_a_direction_but_not_with_a_combination():
    x = batch()
    model, opt = make(direction=lambda grads: [-g for g in grads])
    w = weights(model)
    opt.step(pass_on(model, opt, x), ascent=pass_on(model, opt, x[:2]))
    eps = eq2(-gradient(lambda w: loss_of(w, x[:2]), w), 0.3, 2.0)
    torch.testing.assert_close(weights(model), w - LR * gradient(lambda w: loss_of(w, x), w + eps))
    model, opt = make(combine=surrogate_gap)
    with pytest.raises(ValueError, match="which combine needs"):
        opt.step(pass_on(model, opt, x), ascent=pass_on(model, opt, x[:2]))


def test_the_settings_are_shown():
    _, opt = make(direction=Average(), combine=surrogate_gap)
    assert "Average object" in repr(opt)
    assert "surrogate_gap" in repr(opt)
    assert opt.combine is surrogate_gap
