"""m-sharpness: each micro-batch has its own perturbation; accumulation: they share one."""

import math

import pytest
import torch
from torch import nn

import references
from flatmin import SAM


def data(sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    n = sum(sizes)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(n, generator=generator, dtype=torch.float64)
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def make(rho=0.3, **settings):
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    model.weight.data = torch.tensor([[0.5, -1.0, 2.0]], dtype=torch.float64)
    return model, SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=rho, **settings)


def loss_of(w, batch):
    x, y = batch
    return ((torch.tanh(x @ w.view(-1)) - y) ** 2).mean()


def closure_of(model, opt, batch):
    return references.closure_of(opt, lambda: loss_of(model.weight, batch))


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("sizes", [[4, 4, 4], [5, 5, 2], [7]])
def test_a_list_of_closures_is_the_weighted_mean_of_independent_sam_gradients(p, sizes):
    model, opt = make(p=p)
    batches, w = data(sizes), model.weight.detach().view(-1).clone()
    opt.step([closure_of(model, opt, batch) for batch in batches], weights=sizes)
    expected = sum(
        n / sum(sizes) * references.sam_gradient(lambda v: loss_of(v, batch), w, 0.3, p)[0]
        for n, batch in zip(sizes, batches, strict=True)
    )
    torch.testing.assert_close(model.weight.grad.view(-1), expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(model.weight.detach().view(-1), w - 0.1 * expected, rtol=1e-12, atol=0)


def test_without_weights_micro_batches_count_equally():
    (one, opt_one), (two, opt_two) = make(), make()
    batches = data([5, 2])
    opt_one.step([closure_of(one, opt_one, b) for b in batches])
    opt_two.step([closure_of(two, opt_two, b) for b in batches], weights=[3, 3])
    assert torch.equal(one.weight, two.weight)


def test_it_returns_the_weighted_mean_loss_and_metrics():
    model, opt = make()
    batches, w = data([5, 2]), model.weight.detach().view(-1).clone()
    returned = opt.step([closure_of(model, opt, b) for b in batches], weights=[5, 2])
    whole = loss_of(w, (torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])))
    torch.testing.assert_close(returned, whole)
    torch.testing.assert_close(opt.metrics.loss, whole)
    norms = [references.gradient(lambda v: loss_of(v, b), w).norm() for b in batches]
    torch.testing.assert_close(opt.metrics.grad_norm, (5 * norms[0] + 2 * norms[1]) / 7)


def test_accumulation_shares_one_perturbation_from_the_accumulated_gradient():
    """Way 2 with several backward passes before and within the block is plain SAM on the whole batch."""
    model, opt = make()
    sizes = [5, 5, 2]
    batches, w = data(sizes), model.weight.detach().view(-1).clone()
    for batch in batches:
        (loss_of(model.weight, batch) * len(batch[0]) / sum(sizes)).backward()
    with opt.perturbed():
        opt.zero_grad()
        for batch in batches:
            (loss_of(model.weight, batch) * len(batch[0]) / sum(sizes)).backward()
    opt.step()
    whole = (torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches]))
    g, _ = references.sam_gradient(lambda v: loss_of(v, whole), w, 0.3)
    torch.testing.assert_close(model.weight.detach().view(-1), w - 0.1 * g, rtol=1e-12, atol=0)


def test_a_parameter_that_only_some_micro_batches_use_counts_as_zero_in_the_others():
    a, b, unused = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(3))
    opt = SAM(torch.optim.SGD([a, b, unused], lr=0.1), rho=0.1)

    def closure_for(*params):
        return references.closure_of(opt, lambda: sum((p**2).sum() for p in params) / 2)

    opt.step([closure_for(a, b), closure_for(a)])
    eps = 0.1 / 2  # the gradient of the first is (1, 1, 1, 1), so that each moves by rho / 2
    torch.testing.assert_close(b.grad, torch.full_like(b, (1 + eps) / 2))
    assert unused.grad is None


@pytest.mark.parametrize(
    ("closures", "more", "error", "message"),
    [
        ([], {}, TypeError, "non-empty list"),
        ([1, 2], {}, TypeError, "non-empty list"),
        (pytest.fail, {"weights": [1]}, ValueError, "list of closures"),
        ([pytest.fail], {"ascent": pytest.fail}, ValueError, "one closure"),
        ([pytest.fail] * 2, {"weights": [1.0]}, ValueError, "1 entries for 2 closures"),
        ([pytest.fail] * 2, {"weights": [1.0, -1.0]}, ValueError, "not negative"),
        ([pytest.fail] * 2, {"weights": [0, 0]}, ValueError, "not all 0"),
        ([pytest.fail] * 2, {"weights": [1, math.nan]}, ValueError, "finite"),
    ],
)
def test_bad_lists_and_weights_are_refused_before_anything_is_called(closures, more, error, message):
    model, opt = make()
    with pytest.raises(error, match=message):
        opt.step(closures, **more)
    assert model.weight.grad is None
