"""State dicts, copies and distributed checkpoints go on in lockstep with the original."""

import copy
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

from flatmin import SAM, norm_parameters
from references import closure_of

BASES = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "plain": lambda params: torch.optim.SGD(params, lr=0.05),
    "adam": lambda params: torch.optim.AdamW(params, lr=0.01),
}


def make(base="momentum", seed=0, **settings):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    settings = dict(settings)
    if settings.get("generator") == "given":
        settings["generator"] = torch.Generator().manual_seed(seed)
    return model, SAM(BASES[base](model.parameters()), **({"rho": 0.3, "model": model} | settings))


def step(model, opt, i):
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(i))
    return opt.step(closure_of(opt, lambda: model(x).square().mean()))


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


SETTINGS = [
    {},
    {"adaptive": True, "ascent_steps": 2},
    {"direction": "random"},
    {"direction": "random", "generator": "given"},
]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_state_dict_round_trip_goes_on_in_lockstep(base, settings, tmp_path):
    model, opt = make(base, **settings)
    for i in range(3):
        step(model, opt, i)
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, tmp_path / "checkpoint.pt")
    other, other_opt = make(base, seed=1, **settings)
    step(other, other_opt, 9)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    other.load_state_dict(saved["model"])
    other_opt.load_state_dict(saved["opt"])
    for i in range(3, 6):
        assert torch.equal(step(model, opt, i), step(other, other_opt, i))
        assert equal(model, other)


def test_a_checkpoint_of_the_base_can_be_loaded_and_the_other_way_round():
    model, opt = make()
    step(model, opt, 0)
    plain = BASES["momentum"](model.parameters())
    plain.load_state_dict(opt.state_dict())
    assert plain.state_dict()["state"][0]["momentum_buffer"].equal(opt.state[model[0].weight]["momentum_buffer"])
    _, other = make()
    other.load_state_dict(plain.state_dict())
    assert len(other.state) == len(opt.state)


def test_a_group_radius_is_saved():
    _, opt = make()
    opt.param_groups[0]["sam_rho"] = 0.11
    _, other = make()
    other.load_state_dict(opt.state_dict())
    assert other.param_groups[0]["sam_rho"] == 0.11


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_steps_on_by_itself(settings, how):
    model, opt = make(**settings)
    step(model, opt, 0)
    pair = (model, opt)
    other, other_opt = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert other_opt.model is other
    assert other_opt.param_groups[0]["params"][0] is other[0].weight
    before = copy.deepcopy(model)
    for i in range(1, 3):
        step(other, other_opt, i)
    assert equal(model, before), "the original is untouched"
    for i in range(1, 3):
        step(model, opt, i)
    assert equal(model, other)


def test_a_copy_of_the_optimizer_alone_has_parameters_of_its_own():
    model, opt = make()
    step(model, opt, 0)
    alone = copy.deepcopy(opt)
    step(alone.model, alone, 1)
    step(model, opt, 1)
    assert equal(alone.model, model)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_a_distributed_checkpoint_round_trip_goes_on_in_lockstep(base, settings, flatten, tmp_path):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, opt = make(base, **settings)
    for i in range(2):
        step(model, opt, i)
    opt.zero_grad()
    model_state, opt_state = get_state_dict(model, opt, options=options)
    dcp.save({"model": model_state, "opt": opt_state}, checkpoint_id=tmp_path)

    other, other_opt = make(base, seed=1, **settings)
    model_state, opt_state = get_state_dict(other, other_opt, options=options)  # initializes it by a bare step
    state = {"model": model_state, "opt": opt_state}
    dcp.load(state, checkpoint_id=tmp_path)
    set_state_dict(other, other_opt, model_state_dict=state["model"], optim_state_dict=state["opt"], options=options)
    for i in range(2, 5):
        assert torch.equal(step(model, opt, i), step(other, other_opt, i))
        assert equal(model, other)


def test_initializing_for_a_distributed_checkpoint_changes_no_weight_and_is_not_a_step():
    model, opt = make("adam")
    before = copy.deepcopy(model)
    state = get_optimizer_state_dict(model, opt)
    assert "exp_avg" in state["state"]["0.weight"]
    assert state["param_groups"][0]["sam_default_rho"] == 0.3
    assert equal(model, before)
    assert opt.param_groups[0]["lr"] == 0.01
    assert opt.needs_perturbed_pass


def test_radii_of_groups_stay_with_a_state_dict_that_has_none():
    """A checkpoint of the base optimizer knows no radii: SAM on norm layers must not become SAM on all of them."""
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    plain = [{"params": group["params"]} for group in norm_parameters(model)]
    opt = SAM(torch.optim.SGD(norm_parameters(model), lr=0.1), rho=0.5)
    before = len(opt.perturbed_parameters)
    opt.load_state_dict(torch.optim.SGD(plain, lr=0.2).state_dict())
    assert [group["lr"] for group in opt.param_groups] == [0.2, 0.2]
    assert len(opt.perturbed_parameters) == before == 2
    # A checkpoint of SAM has its own radii, also where it has none.
    opt.load_state_dict(SAM(torch.optim.SGD(plain, lr=0.2), rho=0.3).state_dict())
    assert len(opt.perturbed_parameters) == 6
    assert opt.rho == 0.3


def test_a_generator_that_is_assigned_or_seeded_is_in_the_next_state_dict():
    (model, opt), (other_model, other) = (make(direction="random") for _ in range(2))
    opt.generator = torch.Generator().manual_seed(7)
    opt.generator.manual_seed(8)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    for one, its in ((model, opt), (other_model, other)):
        step(one, its, 0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other_model.parameters(), strict=True))
