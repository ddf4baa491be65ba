"""Weights come back bit for bit, whatever happens."""

import math

import pytest
import torch
from torch import nn

from flatmin import SAM
from references import closure_of


def make(dtype=torch.float32, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    x = torch.randn(16, 4, dtype=dtype)
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), **({"rho": 0.5} | settings))
    return model, opt, lambda: model(x).float().square().mean()


def snapshot(model):
    return [p.detach().clone() for p in model.parameters()]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_weights_are_moved_inside_the_block_and_the_same_bits_after_it(dtype):
    model, opt, loss = make(dtype)
    before, storage = snapshot(model), [p.data_ptr() for p in model.parameters()]
    loss().backward()
    with opt.perturbed():
        assert not equal(before, snapshot(model))
        assert storage == [p.data_ptr() for p in model.parameters()]
    assert equal(before, snapshot(model))
    assert storage == [p.data_ptr() for p in model.parameters()]


def test_negative_zero_and_weights_that_cancel_come_back_too():
    """Subtracting eps again would lose both."""
    w = nn.Parameter(torch.tensor([-0.0, 1e-20, 1.0]))
    before = w.detach().clone()
    opt = SAM(torch.optim.SGD([w], lr=0.1), rho=0.5)
    w.sum().backward()
    with opt.perturbed():
        pass
    assert w.detach().view(torch.int32).equal(before.view(torch.int32))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_the_second_pass_restores_weights_and_batch_norm(error):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5, model=model)
    x, calls = torch.randn(16, 4), []

    def closure():
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        calls.append([t.clone() for t in model.buffers()])
        if len(calls) == 2:
            raise error
        return loss

    before = snapshot(model)
    with pytest.raises(error):
        opt.step(closure)
    assert equal(before, snapshot(model))
    assert equal(calls[0], model.buffers())
    assert opt.step(lambda: calls.clear() or closure()) is not None  # and it steps on


def test_an_exception_in_the_first_pass_leaves_all_as_it_was():
    model, opt, _ = make()
    before = snapshot(model)

    def closure():
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        opt.step(closure)
    assert equal(before, snapshot(model))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("bad", [math.inf, math.nan, 0.0])
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_zero_or_non_finite_gradient_perturbs_nothing(p, bad, adaptive):
    model, opt, _ = make(p=p, adaptive=adaptive)
    for param in model.parameters():
        param.grad = torch.zeros_like(param) if bad == 0 else torch.ones_like(param)
    model[0].weight.grad[0, 0] = bad
    before = snapshot(model)
    with opt.perturbed():
        assert equal(before, snapshot(model))
        loss = model(torch.ones(1, 4)).sum()
        loss.backward()
    assert opt.metrics.perturbation_norm.item() == 0


def test_a_parameter_without_a_gradient_in_the_second_pass_is_restored():
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    opt = SAM(torch.optim.SGD([a, b], lr=0.1), rho=0.5)
    (a.sum() + b.sum()).backward()
    with opt.perturbed():
        opt.zero_grad()
        (a * a).sum().backward()
    opt.step()
    assert b.tolist() == [1.0, 1.0, 1.0]
    assert a[0] < 1


def test_a_parameter_without_a_gradient_in_the_first_pass_is_not_perturbed_but_trained():
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    opt = SAM(torch.optim.SGD([a, b], lr=0.1), rho=0.5)
    a.sum().backward()
    with opt.perturbed():
        assert b.tolist() == [1.0, 1.0, 1.0]
        torch.testing.assert_close(a.detach(), torch.full((3,), 1 + 0.5 / math.sqrt(3)))
        (a.sum() + b.sum()).backward()
    opt.step()
    torch.testing.assert_close(b.detach(), torch.full((3,), 0.9))


def test_a_frozen_parameter_is_left_alone_and_may_be_thawed():
    model, opt, loss = make()
    model[0].weight.requires_grad_(False)
    loss().backward()
    before = model[0].weight.clone()
    with opt.perturbed():
        assert torch.equal(model[0].weight, before)
    model[0].weight.requires_grad_(True)
    loss().backward()
    with opt.perturbed():
        assert not torch.equal(model[0].weight, before)
    assert torch.equal(model[0].weight, before)


def test_a_frozen_parameter_with_a_gradient_of_old_does_not_move():
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    opt = SAM(torch.optim.SGD([a, b], lr=0.1), rho=0.5)
    (a.sum() + b.sum()).backward()
    b.requires_grad_(False)
    with opt.perturbed():
        assert b.tolist() == [1.0, 1.0, 1.0]
        torch.testing.assert_close(a.detach(), torch.full((3,), 1 + 0.5 / math.sqrt(3)))


def test_a_change_of_dtype_between_steps_is_noticed():
    """A backup of the old dtype would bring back rounded weights."""
    model, opt, loss = make()
    loss().backward()
    with opt.perturbed():
        pass
    model.double()
    for p in model.parameters():
        p.data += math.pi * 1e-9
        p.grad = torch.ones_like(p)
    before = snapshot(model)
    with opt.perturbed():
        pass
    assert equal(before, snapshot(model))


def test_tied_weights_are_perturbed_once_and_stay_tied():
    embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    opt = SAM(torch.optim.SGD(embedding.parameters(), lr=0.1), rho=0.5)
    before = embedding.weight.detach().clone()
    head(embedding(torch.tensor([0, 1]))).square().mean().backward()
    with opt.perturbed():
        assert (embedding.weight - before).norm().item() == pytest.approx(0.5, rel=1e-5)
        assert head.weight is embedding.weight
        head(embedding(torch.tensor([0, 1]))).square().mean().backward()
    opt.step()
    assert head.weight is embedding.weight


def test_channels_last_weights_keep_their_layout():
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    opt = SAM(torch.optim.SGD(conv.parameters(), lr=0.1), rho=0.5)
    before = conv.weight.detach().clone()
    conv(torch.randn(2, 3, 8, 8)).square().mean().backward()
    gradient = torch.cat([p.grad.flatten() for p in conv.parameters()])
    expected = before + 0.5 * conv.weight.grad / gradient.norm()
    with opt.perturbed():
        torch.testing.assert_close(conv.weight.detach(), expected)
        assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(conv.weight, before)


def test_a_sparse_gradient_is_perturbed_like_a_dense_one():
    torch.manual_seed(0)
    sparse, dense = nn.Embedding(6, 3, sparse=True), nn.Embedding(6, 3)
    dense.load_state_dict(sparse.state_dict())
    index = torch.tensor([1, 1, 4])
    for layer in (sparse, dense):
        opt = SAM(torch.optim.SGD(layer.parameters(), lr=0.1), rho=0.5)
        closure = closure_of(opt, lambda: (layer(index) ** 3).sum())
        opt.step(closure)
        opt.step([closure, closure], weights=[1, 3])
    torch.testing.assert_close(sparse.weight, dense.weight)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_a_complex_parameter_is_perturbed_like_a_pair_of_real_ones(p):
    start = torch.tensor([1.0 + 2.0j, -0.5 + 0.1j])
    z = nn.Parameter(start.clone())
    xy = nn.Parameter(torch.view_as_real(start).clone())
    for param, loss in ((z, lambda: (z.abs() ** 4).sum()), (xy, lambda: (xy.square().sum(-1) ** 2).sum())):
        opt = SAM(torch.optim.SGD([param], lr=0.01), rho=0.1, p=p)
        opt.step(closure_of(opt, loss))
    torch.testing.assert_close(torch.view_as_real(z.detach()), xy.detach())


def test_a_gradient_that_is_conjugated_lazily_is_taken_as_it_is():
    """Of Re(conj(w) x) the gradient is x, which autograd gives as a conjugate view."""
    x = torch.tensor([2.0 - 1.0j, 1.0 + 1.0j], dtype=torch.complex128)
    w = nn.Parameter(torch.tensor([1.0 + 2.0j, 3.0 - 1.0j], dtype=torch.complex128))
    before = w.detach().clone()
    opt = SAM(torch.optim.SGD([w], lr=0.1), rho=0.5)
    opt.step(closure_of(opt, lambda: (w.conj() * x).real.sum()))
    torch.testing.assert_close(w.detach(), before - 0.1 * x)
