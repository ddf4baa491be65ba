"""Bad input: an error that names the argument and the remedy, with nothing changed."""

import math

import pytest
import torch
from torch import nn

from flatmin import SAM


def base():
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"rho": -0.1}, ValueError, "rho must be finite and not negative, got -0.1"),
        ({"rho": math.inf}, ValueError, "rho must be finite"),
        ({"rho": math.nan}, ValueError, "rho must be finite"),
        ({"rho": "0.1"}, TypeError, "rho must be a number"),
        ({"rho": True}, TypeError, "rho must be a number"),
        ({"p": 0.99}, ValueError, r"p must be in \[1, inf\], got 0.99"),
        ({"p": math.nan}, ValueError, "p must be"),
        ({"p": "2"}, TypeError, "p must be a number"),
        ({"ascent_steps": 0}, ValueError, "ascent_steps must be at least 1, got 0"),
        ({"ascent_steps": 1.5}, TypeError, "ascent_steps must be a whole number"),
        ({"ascent_steps": 2, "p": 3.0}, ValueError, "ascent_steps=2 with p=3.0"),
        ({"ascent_steps": 2, "direction": "random"}, ValueError, "ascent_steps=2 with direction"),
        ({"direction": "up"}, ValueError, "direction must be"),
        ({"adaptive": -1.0}, ValueError, "adaptive"),
        ({"adaptive": math.nan}, ValueError, "adaptive"),
        ({"adaptive": "yes"}, TypeError, "adaptive"),
        ({"model": "resnet"}, TypeError, "model must be an nn.Module"),
        ({"generator": 3}, TypeError, "generator must be a torch.Generator"),
        ({"weight": -1.0}, ValueError, "weight must be finite and not negative"),
        ({"weight": math.inf}, ValueError, "weight must be finite"),
        ({"weight": "1"}, TypeError, "weight must be a number"),
        ({"direction": "momentum", "weight": 2.0}, ValueError, "weight=2.0"),
        ({"direction": "momentum", "ascent_steps": 2}, ValueError, "ascent_steps=2"),
    ],
)
def test_a_bad_setting_is_named(settings, error, message):
    with pytest.raises(error, match=message):
        SAM(base(), **settings)


def test_a_bad_group_radius_is_named_when_it_is_given():
    w = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="sam_rho"):
        SAM(torch.optim.SGD([{"params": [w], "sam_rho": -1.0}], lr=0.1))
    opt = SAM(base())
    with pytest.raises(ValueError, match="sam_rho"):
        opt.add_param_group({"params": [w], "sam_rho": math.nan})
    assert len(opt.param_groups) == 1
    with pytest.raises(ValueError, match="rho"):
        opt.rho = -1


ONE_LINE = r"Write SAM\(torch.optim.SGD\(model.parameters\(\), lr=0.1, momentum=0.9\), rho=0.05, model=model\)"
FOREIGN = type("Optimizer", (), {"__module__": "fastai.optimizer"})()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: SAM(torch.optim.SGD, rho=0.05), r"built optimizer, got the class SGD.*SAM\(torch.optim.SGD"),
        (lambda p: SAM(list(p)), "base must be a built optimizer, got list"),
        (lambda p: SAM(SAM(base())), "SAM already"),
        (lambda p: SAM(FOREIGN), "must be a torch.optim.Optimizer, got fastai.optimizer.Optimizer"),
        (lambda p: SAM(torch.optim.LBFGS(p)), "base is LBFGS"),
        # As in other libraries.
        (lambda p: SAM(p, torch.optim.SGD, lr=0.1), ONE_LINE),
        (lambda p: SAM(p, base_optimizer=torch.optim.SGD, lr=0.1), ONE_LINE),
        (lambda p: SAM(p), "got generator: SAM wraps an optimizer.*" + ONE_LINE),
    ],
)
def test_what_is_not_a_base_is_refused_with_what_to_write(call, message):
    with pytest.raises(TypeError, match=message):
        call(nn.Linear(2, 1).parameters())


@pytest.mark.parametrize("name", ["first_step", "second_step"])
def test_methods_of_other_libraries_say_what_to_write(name):
    with pytest.raises(AttributeError, match=ONE_LINE):
        getattr(SAM(base()), name)


def make():
    w = nn.Parameter(torch.tensor([1.0, 2.0]))
    opt = SAM(torch.optim.SGD([w], lr=0.1), rho=0.5)
    return w, opt


def no_block(w, opt):
    pass


def warm_up_from_zero(w, opt):
    opt.param_groups[0]["lr"] = 0.0


def empty_block(w, opt):
    with opt.perturbed():
        pass


def failed_block(w, opt):
    with pytest.raises(RuntimeError), opt.perturbed():
        w.sum().backward()
        raise RuntimeError


def used_block(w, opt):
    with opt.perturbed():
        w.sum().backward()
    opt.step()


def gradients_zeroed_in_place(w, opt):
    with opt.perturbed():
        w.sum().backward()
    opt.zero_grad(set_to_none=False)
    w.sum().backward()


def gradients_dropped(w, opt):
    with opt.perturbed():
        w.sum().backward()
    w.grad = None
    w.sum().backward()


def loaded(w, opt):
    with opt.perturbed():
        w.sum().backward()
    opt.load_state_dict(opt.state_dict())


@pytest.mark.parametrize(
    "before",
    [
        *(no_block, warm_up_from_zero, empty_block, failed_block),
        *(used_block, gradients_zeroed_in_place, gradients_dropped, loaded),
    ],
)
def test_a_step_without_a_closure_needs_the_gradients_of_a_second_pass(before):
    w, opt = make()
    w.sum().backward()
    before(w, opt)
    start = w.detach().clone()
    with pytest.raises(TypeError, match=r"needs a closure, or a pass at the perturbed weights.*opt.perturbed"):
        opt.step()
    assert torch.equal(w, start)


def test_blocks_cannot_be_nested_and_no_step_is_taken_within():
    w, opt = make()
    w.sum().backward()
    with opt.perturbed():
        w.sum().backward()
        moved = w.detach().clone()
        with pytest.raises(ValueError, match="inside `with opt.perturbed"), opt.perturbed():
            pass
        with pytest.raises(ValueError, match="inside `with opt.perturbed"):
            opt.step()
        with pytest.raises(ValueError, match="inside `with opt.perturbed"):
            opt.step(lambda: w.sum())
        assert torch.equal(w, moved)
    assert w.tolist() == [1.0, 2.0]


def test_several_ascent_steps_need_a_closure():
    w, _ = make()
    opt = SAM(torch.optim.SGD([w], lr=0.1), ascent_steps=2)
    w.sum().backward()
    with pytest.raises(ValueError, match="ascent_steps=2"), opt.perturbed():
        pass


def test_a_block_without_gradients_is_refused():
    w, opt = make()
    with pytest.raises(ValueError, match="no gradients to ascend along"), opt.perturbed():
        pass
    with pytest.raises(ValueError, match="no gradients to ascend along"):
        opt.step(lambda: torch.tensor(1.0))
    assert w.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (None, TypeError, "The closure returned None: it must return the loss"),
        ({"loss": torch.ones(())}, TypeError, r"The closure returned a dict.*Return outputs\['loss'\]"),
        (torch.ones(2), ValueError, "scalar loss, got a tensor of shape"),
    ],
)
def test_a_closure_that_returns_no_loss_is_refused_before_any_weight_moves(result, error, message):
    w, opt = make()

    def closure():
        opt.zero_grad()
        w.sum().backward()
        return result

    with pytest.raises(error, match=message):
        opt.step(closure)
    assert w.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("loss_fn", "error", "message"),
    [
        (lambda w, x: None, TypeError, "loss_fn must return the mean loss as a tensor.*got None"),
        (lambda w, x: (w * x).sum().item(), TypeError, "got a float"),
        (lambda w, x: (w * x).square(), ValueError, r"got a tensor of shape .*, 2.. Use loss.mean"),
        (lambda w, x: (w * x).sum().detach(), ValueError, "detached from the parameters"),
    ],
)
@pytest.mark.parametrize("part", [1.0, 0.5])
def test_a_loss_function_that_returns_no_loss_is_refused_before_any_weight_moves(loss_fn, error, message, part):
    w, opt = make()
    with pytest.raises(error, match=message):
        opt.step_batch(lambda x: loss_fn(w, x), torch.ones(4, 2), part=part)
    assert w.tolist() == [1.0, 2.0]


def test_a_random_direction_takes_no_ascent_closure():
    opt = SAM(base(), direction="random")
    with pytest.raises(ValueError, match="ascent"):
        opt.step(pytest.fail, ascent=pytest.fail)


def test_fsdp1_is_refused_by_name():
    class FullyShardedDataParallel(nn.Linear):
        pass

    with pytest.raises(ValueError, match="FSDP1.*fully_shard"):
        SAM(base(), model=FullyShardedDataParallel(1, 1))


@pytest.mark.filterwarnings("ignore:model has none of the parameters")
def test_a_static_ddp_graph_is_refused_unless_the_perturbation_is_shared():
    model = nn.Linear(1, 1)
    model.static_graph = True
    with pytest.raises(ValueError, match=r"static_graph=True.*sync_perturbation=True"):
        SAM(base(), model=model)
    SAM(base(), model=model, sync_perturbation=True)
