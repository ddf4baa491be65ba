"""Batch norm's statistics come from the first pass; random layers draw the same noise in every pass."""

import pytest
import torch
from torch import nn

from flatmin import SAM
from references import closure_of


class RunningRms(nn.Module):
    """A normalization layer that is none of torch's own."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("running_rms", torch.ones(width))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.running_rms.lerp_(x.square().mean(0).sqrt(), 0.1)
                self.steps += 1
        return x / self.running_rms


LAYERS = {
    "batch norm": lambda: nn.BatchNorm1d(8),
    "cumulative batch norm": lambda: nn.BatchNorm1d(8, momentum=None),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    ),
    "a third party's": lambda: RunningRms(8),
}


def make(norm, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), norm(), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(16, 4)
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), **({"rho": 0.5, "model": model} | settings))

    return model, opt, closure_of(opt, lambda: model(x).square().mean()), x


def buffers(model):
    return {name: t.clone() for name, t in model.named_buffers()}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("way", ["closure", "perturbed", "three ascent steps", "list", "random"])
def test_statistics_are_those_of_one_pass_at_the_unperturbed_weights(layer, way):
    model, opt, closure, x = make(
        LAYERS[layer],
        ascent_steps=3 if way == "three ascent steps" else 1,
        direction="random" if way == "random" else "gradient",
    )
    reference, _, _, _ = make(LAYERS[layer])
    storage = [t.data_ptr() for t in model.buffers()]
    for _ in range(3):
        reference.load_state_dict(model.state_dict())
        reference(x)
        if way == "perturbed":
            closure()
            with opt.perturbed():
                closure()
            opt.step()
        elif way == "list":
            opt.step([closure])
        else:
            opt.step(closure)
        expected = buffers(reference)
        for name, value in buffers(model).items():
            assert torch.equal(value, expected[name]), name
    assert storage == [t.data_ptr() for t in model.buffers()]


def test_without_the_model_statistics_see_both_passes():
    model, opt, closure, _ = make(LAYERS["batch norm"], model=None)
    opt.step(closure)
    assert model[1].num_batches_tracked.item() == 2


def test_layers_in_eval_mode_are_left_alone_and_random_needs_no_first_pass_then():
    model, opt, closure, _ = make(LAYERS["batch norm"], direction="random")
    model.eval()
    calls = []
    opt.step(lambda: calls.append(1) or closure())
    assert len(calls) == 1
    model.train()
    opt.step(lambda: calls.append(1) or closure())
    assert len(calls) == 3


def test_a_layer_replaced_during_training_is_looked_after():
    model, opt, closure, _ = make(LAYERS["batch norm"])
    opt.step(closure)
    model[1] = nn.BatchNorm1d(8)
    opt.step(closure)
    assert model[1].num_batches_tracked.item() == 1


def test_the_model_may_be_given_later():
    model, opt, closure, _ = make(LAYERS["batch norm"], model=None)
    opt.model = model
    opt.step(closure)
    assert model[1].num_batches_tracked.item() == 1


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("with_model", [True, False])
def test_dropout_draws_the_same_mask_in_all_passes_of_a_closure(steps, with_model):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.ones(1000))
    model = nn.Dropout(0.5)
    opt = SAM(torch.optim.SGD([weight], lr=0.0), ascent_steps=steps, model=model if with_model else None)
    masks = []

    def closure():
        opt.zero_grad()
        dropped = model(weight)
        masks.append(dropped.detach() != 0)
        loss = dropped.sum()
        loss.backward()
        return loss

    torch.manual_seed(7)
    opt.step(closure)
    assert len(masks) == steps + 1
    assert all(torch.equal(masks[0], mask) for mask in masks)
    after = torch.rand(3)
    torch.manual_seed(7)
    model(weight)
    assert torch.equal(after, torch.rand(3)), "the generator does not stand where one pass would have left it"

    masks.clear()
    opt.step([closure, closure])
    assert torch.equal(masks[0], masks[steps])
    assert not torch.equal(masks[0], masks[-1]), "each closure of a list has noise of its own"


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
    w = nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
    opt = SAM(torch.optim.SGD([w], lr=0.1), rho=0.3)
    opt.zero_grad()
    w.pow(4).sum().backward()
    torch.rand(3)
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError), opt.perturbed():
        torch.rand(5)
        raise RuntimeError
    assert torch.equal(torch.get_rng_state(), state)
