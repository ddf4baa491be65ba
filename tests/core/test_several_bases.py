"""Several base optimizers under one SAM: one joint norm, one set of passes, and a step of each."""

import copy
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim.optimizer import register_optimizer_step_post_hook

import fsdp_cases
from flatmin import SAM, suggest_rho
from flatmin.core.compat import TORCH
from references import eq2, flat, gradient

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()


def halves(model):
    """Matrices, and the rest."""
    parameters = list(model.parameters())
    return [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim < 2]


def sgd(params, **settings):
    return torch.optim.SGD(params, **({"lr": 0.05, "momentum": 0.9} | settings))


def adamw(params, **settings):
    return torch.optim.AdamW(params, **({"lr": 0.01} | settings))


def make(kinds=(sgd, adamw), seed=0, **settings):
    model = make_model(seed)
    bases = [kind(half) for kind, half in zip(kinds, halves(model), strict=True)]
    return model, SAM(bases, **({"rho": 0.3, "model": model} | settings))


def batch(i):
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(i), dtype=torch.float64)


def pass_on(model, opt, x):
    def closure():
        opt.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    return closure


def closure_step(model, opt, x):
    return opt.step(pass_on(model, opt, x))


def two_passes(model, opt, x):
    pass_on(model, opt, x)()
    if opt.needs_perturbed_pass:
        with opt.perturbed():
            pass_on(model, opt, x)()
    opt.step()


def micro_batches(model, opt, x):
    opt.step([pass_on(model, opt, x[:6]), pass_on(model, opt, x[6:])], weights=[6, 10])


def on_a_part(model, opt, x):
    opt.step_batch(lambda x: (model(x) - 1).square().mean(), x, part=0.25)


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("way", [closure_step, two_passes, micro_batches, on_a_part])
@pytest.mark.parametrize(
    "settings", [{}, {"p": 1.5, "adaptive": True}, {"direction": "random"}, {"weight": 0.5}], ids=str
)
def test_two_optimizers_of_one_kind_are_one_optimizer_bit_for_bit(way, settings):
    split, opt = make((sgd, sgd), **settings)
    model = make_model()
    one = SAM(sgd([{"params": half} for half in halves(model)]), rho=0.3, model=model, **settings)
    for i in range(3):
        way(split, opt, batch(i))
        way(model, one, batch(i))
        assert equal(split, model)


@pytest.mark.parametrize("p", [1.0, 2.0, float("inf")])
def test_the_norm_is_joint_and_each_base_steps_with_the_gradient_there(p):
    model, opt = make(p=p)
    reference = copy.deepcopy(model)
    own = [kind(half) for kind, half in zip((sgd, adamw), halves(reference), strict=True)]
    for i in range(3):
        closure_step(model, opt, batch(i))
        parameters = [p for half in halves(reference) for p in half]
        sizes, shapes = [p.numel() for p in parameters], [p.shape for p in parameters]
        names = {id(p): name for name, p in reference.named_parameters()}

        def loss(w):
            views = [v.view(shape) for v, shape in zip(w.split(sizes), shapes, strict=True)]
            named = {names[id(p)]: v for p, v in zip(parameters, views, strict=True)}
            named |= {name: b.clone() for name, b in reference.named_buffers()}
            return (torch.func.functional_call(reference, named, (batch(i),)) - 1).square().mean()

        w = flat(parameters)
        found = gradient(loss, w + eq2(gradient(loss, w), 0.3, p))
        for q, g in zip(parameters, found.split(sizes), strict=True):
            q.grad = g.view_as(q)
        for one in own:
            one.step()
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)
    assert opt.metrics.perturbation_norm == pytest.approx(0.3)


def test_groups_and_state_are_the_bases_own():
    model, opt = make()
    closure_step(model, opt, batch(0))
    assert isinstance(opt.bases, tuple)
    assert [id(group) for group in opt.param_groups] == [id(g) for base in opt.bases for g in base.param_groups]
    assert len(opt.state) == len(opt.bases[0].state) + len(opt.bases[1].state) == len(list(model.parameters()))
    assert "momentum_buffer" in opt.state[model[0].weight]
    assert "exp_avg" in opt.state[model[0].bias]
    opt.state[model[0].bias] = {"step": torch.tensor(7.0)}
    assert opt.bases[1].state[model[0].bias]["step"] == 7
    del opt.state[model[0].bias]
    assert model[0].bias not in opt.state
    assert opt.state.get(model[0].bias) is None
    assert opt.state[model[0].bias] == {}
    assert set(opt.defaults) == set(opt.bases[0].defaults) & set(opt.bases[1].defaults)
    opt.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert repr(opt).count("Parameter Group 0") == 2


def test_one_base_stays_the_base():
    base = sgd(make_model().parameters())
    for given in (base, [base], (base,)):
        opt = SAM(given)
        assert opt.base is base
        assert opt.bases == (base,)


# Schedulers, hooks, scalers.


@pytest.mark.parametrize("loaded", [False, True])
def test_schedulers_may_hold_a_base_or_sam(loaded):
    model, opt = make()
    on_base = torch.optim.lr_scheduler.ExponentialLR(opt.bases[0], 0.5)
    on_sam = torch.optim.lr_scheduler.MultiplicativeLR(opt, lambda epoch: 0.1)
    if loaded:
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    closure_step(model, opt, batch(0))
    on_base.step()
    on_sam.step()
    assert [group["lr"] for group in opt.param_groups] == pytest.approx([0.05 * 0.5 * 0.1, 0.01 * 0.1])
    assert opt.bases[1].param_groups[0]["lr"] == pytest.approx(0.001)


def test_hooks_of_each_base_of_all_and_of_sam_run_once():
    model, opt = make()
    calls = []
    for index, base in enumerate(opt.bases):
        base.register_step_pre_hook(lambda *args, index=index: calls.append(index))
    opt.base.register_step_pre_hook(lambda *args: calls.append("all"))
    opt.register_step_post_hook(lambda *args: calls.append("sam"))
    handle = register_optimizer_step_post_hook(lambda one, *args: calls.append(type(one).__name__))
    try:
        closure_step(model, opt, batch(0))
    finally:
        handle.remove()
    assert calls == ["all", 0, "SGD", 1, "AdamW", "sam"]


def test_a_gradient_scaler_changes_nothing_and_skips_a_step_of_all():
    results = []
    for scale in (None, 256.0):
        model, opt = make()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for i, factor in enumerate((1.0, float("inf"), 1.0)):
            if scale is None and factor != 1.0:
                continue
            before = copy.deepcopy(model)
            opt.zero_grad()
            scaler.scale((model(batch(i)) - 1).square().mean() * factor).backward()
            with opt.perturbed():
                scaler.scale((model(batch(i)) - 1).square().mean() * factor).backward()
            scaler.step(opt)
            scaler.update()
            if factor != 1.0:
                assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))
        results.append(flat(model.parameters()))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)


def test_a_suggested_radius_is_for_the_joint_norm():
    model, opt = make(model=None)
    found = suggest_rho(opt, lambda x: (model.eval()(x) - 1).square().mean(), [batch(0)])
    loss = (model(batch(0)) - 1).square().mean()
    g = flat(torch.autograd.grad(loss, list(model.parameters())))
    assert found.rho == pytest.approx(float(0.1 * loss.detach() / g.norm()))


def test_momenta_of_different_names_make_one_direction():
    model, opt = make(direction="momentum", rho=1.0)
    closure_step(model, opt, batch(0))
    state, parameters = opt.state, opt.perturbed_parameters
    keys = ["momentum_buffer" if p.ndim == 2 else "exp_avg" for p in parameters]
    v = flat([state[p][key] for p, key in zip(parameters, keys, strict=True)])
    before = flat(parameters)
    with opt.perturbed():
        torch.testing.assert_close(flat(parameters) - before, -v / v.norm())
        pass_on(model, opt, batch(1))()
    opt.step()


def test_a_base_without_momentum_has_no_momentum_direction():
    model, opt = make((sgd, lambda params: sgd(params, momentum=0)), direction="momentum")
    closure_step(model, opt, batch(0))
    with pytest.raises(ValueError, match="but SGD has none"):
        closure_step(model, opt, batch(1))


@needs_muon
def test_muon_for_matrices_and_adamw_for_the_rest():
    model, opt = make((torch.optim.Muon, adamw))
    losses = [closure_step(model, opt, batch(0)).item() for _ in range(5)]
    assert losses[-1] < losses[0]
    assert opt.metrics.perturbation_norm == pytest.approx(0.3)


# Checkpoints.


@pytest.mark.parametrize("direction", ["gradient", "random"])
def test_a_state_dict_round_trip_goes_on_in_lockstep(direction, tmp_path):
    model, opt = make(direction=direction)
    for i in range(3):
        closure_step(model, opt, batch(i))
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, tmp_path / "checkpoint.pt")
    other, other_opt = make(seed=1, direction=direction, rho=0.1)
    closure_step(other, other_opt, batch(9))
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    other.load_state_dict(saved["model"])
    other_opt.load_state_dict(saved["opt"])
    assert other_opt.rho == 0.3
    for i in range(3, 6):
        closure_step(model, opt, batch(i))
        closure_step(other, other_opt, batch(i))
        assert equal(model, other)


def test_a_state_dict_has_the_form_of_one_optimizer_with_all_groups():
    split, opt = make((sgd, sgd))
    model = make_model()
    one = SAM(sgd([{"params": half} for half in halves(model)]), rho=0.3, model=model)
    closure_step(split, opt, batch(0))
    closure_step(model, one, batch(0))
    ours, theirs = opt.state_dict(), one.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert list(ours["state"]) == list(theirs["state"])
    opt.load_state_dict(theirs)
    one.load_state_dict(ours)
    closure_step(split, opt, batch(1))
    closure_step(model, one, batch(1))
    assert equal(split, model)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_steps_on_by_itself(how):
    model, opt = make()
    closure_step(model, opt, batch(0))
    other, other_opt = how((model, opt))
    before = copy.deepcopy(model)
    closure_step(other, other_opt, batch(1))
    assert equal(model, before)
    closure_step(model, opt, batch(1))
    assert equal(model, other)


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize(
    "kinds",
    [
        (sgd, adamw),
        pytest.param(
            (sgd, lambda params: sgd(params, momentum=0)),
            marks=pytest.mark.skipif(TORCH < (2, 13), reason="older torch wants a state of all parameters or of none"),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_a_distributed_checkpoint_goes_on_in_lockstep(flatten, kinds, tmp_path):
    # Not strict: torch expects a state of every parameter, and a base without momentum has none.
    options = StateDictOptions(flatten_optimizer_state_dict=flatten, strict=False)
    model, opt = make(kinds)
    for i in range(2):
        closure_step(model, opt, batch(i))
    opt.zero_grad()
    model_state, opt_state = get_state_dict(model, opt, options=options)
    dcp.save({"model": model_state, "opt": opt_state}, checkpoint_id=tmp_path)
    other, other_opt = make(kinds, seed=1)
    model_state, opt_state = get_state_dict(other, other_opt, options=options)
    state = {"model": model_state, "opt": opt_state}
    dcp.load(state, checkpoint_id=tmp_path)
    set_state_dict(other, other_opt, model_state_dict=state["model"], optim_state_dict=state["opt"], options=options)
    for i in range(2, 4):
        closure_step(model, opt, batch(i))
        closure_step(other, other_opt, batch(i))
        assert equal(model, other)


@pytest.mark.parametrize("bad", ["groups", "parameters"])
def test_a_failed_load_changes_nothing(bad):
    model, opt = make()
    closure_step(model, opt, batch(0))
    state = copy.deepcopy(opt.state_dict())
    state["param_groups"][0]["lr"] = 7.0
    if bad == "groups":
        state["param_groups"].append(state["param_groups"][0])
    else:
        state["param_groups"][1]["params"].pop()  # after the first base has loaded its part
    groups = [id(group) for group in opt.param_groups]
    with pytest.raises(ValueError, match="group"):
        opt.load_state_dict(state)
    assert [id(group) for group in opt.param_groups] == groups
    assert opt.param_groups[0]["lr"] == 0.05
    assert opt.rho == 0.3
    closure_step(model, opt, batch(1))


# Errors.


def test_a_parameter_in_two_bases_is_an_error():
    model = make_model()
    with pytest.raises(ValueError, match=r"bases 0 and 1 have a parameter in common, of shape \(8, 4\)"):
        SAM([sgd(model.parameters()), adamw(model.parameters())])
    one = sgd(model.parameters())
    with pytest.raises(ValueError, match="have a parameter in common"):
        SAM([one, one])


def test_a_group_is_added_to_one_of_the_bases():
    model, opt = make()
    new = nn.Parameter(torch.ones(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"opt\.bases\[i\]\.add_param_group"):
        opt.add_param_group({"params": [new]})
    opt.bases[0].add_param_group({"params": [new], "sam_rho": 0.0})
    assert len(opt.param_groups) == 3
    closure_step(model, opt, batch(0))


@pytest.mark.parametrize(
    ("make_bases", "message"),
    [
        (lambda model: [sgd(model.parameters()), torch.optim.AdamW], "got the class AdamW"),
        (lambda model: [sgd(model.parameters()), "adamw"], "must be a built optimizer, got str"),
        (lambda model: [SAM(sgd(halves(model)[0])), adamw(halves(model)[1])], "base is a SAM already"),
        (lambda model: [], "SAM wraps an optimizer"),
        (lambda model: list(model.parameters()), "SAM wraps an optimizer"),
        (lambda model: [torch.optim.LBFGS(halves(model)[0]), adamw(halves(model)[1])], "calls the closure itself"),
    ],
)
def test_other_lists_are_refused(make_bases, message):
    with pytest.raises(TypeError, match=message):
        SAM(make_bases(make_model()))


# Shards.


@pytest.mark.parametrize("matrices", ["sgd", pytest.param("muon", marks=needs_muon)])
def test_fsdp_with_two_optimizers_is_a_single_process_with_two(two_processes, matrices, tmp_path):
    results = two_processes.run(fsdp_cases.train_two_optimizers, matrices, str(tmp_path))
    expected = fsdp_cases.single_process_with_two_optimizers(matrices)
    # Muon computes in bfloat16.
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if matrices == "sgd" else {"rtol": 0.02, "atol": 0.002}
    for got, loaded in results:
        torch.testing.assert_close(got, expected, **tolerance)
        assert torch.equal(got, loaded)
