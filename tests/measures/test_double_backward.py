import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from flatmin.measures import HessianOperator
from flatmin.measures.double_backward import TwiceDifferentiable, _Convolution
from measures.cases import assert_untouched, dense_hessian, everything


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def conv(*shapes, **settings):
    return lambda *tensors: F.conv2d(*tensors, **settings), shapes


def norm(num_dims, bias=True):
    mean, var = normal(4, seed=1), normal(4, seed=2).exp()

    def run(x, w, b=None):
        return F.batch_norm(x, mean, var, w, b, eps=0.1)

    return run, [(3, 4, 5, 5)[:num_dims], (4,), (4,)][: 3 if bias else 2]


OPERATIONS = {
    "convolution": conv((3, 4, 5, 5), (6, 4, 3, 3), (6,)),
    "convolution without bias": conv((3, 4, 5, 5), (6, 4, 3, 3)),
    "convolution, strided and padded": conv((3, 4, 6, 5), (6, 4, 3, 2), (6,), stride=(2, 1), padding=(1, 0)),
    "convolution, dilated": conv((3, 4, 7, 7), (6, 4, 3, 3), (6,), dilation=2, padding=1),
    "convolution of groups": conv((3, 4, 5, 5), (6, 2, 3, 3), (6,), groups=2),
    "batch norm": norm(4),
    "batch norm without bias": norm(4, bias=False),
    "batch norm of vectors": norm(2),
    "ReLU": (F.relu, [(3, 4, 5)]),
    "torch's ReLU": (torch.relu, [(3, 4, 5)]),
}


def hessian_product(run, leaves):
    """The Hessian of a loss with curvature of its own, times a direction, in the leaves that ask for it."""
    outputs = run(*leaves)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    grads = torch.autograd.grad((outputs**3).sum(), wanted, create_graph=True)
    # As columns of a matrix are: not contiguous.
    direction = [normal(*leaf.shape, 2, seed=3 + i)[..., 0] for i, leaf in enumerate(wanted)]
    return outputs, torch.autograd.grad(grads, wanted, direction)


@pytest.mark.parametrize(("run", "shapes"), OPERATIONS.values(), ids=OPERATIONS)
def test_second_derivatives_are_those_of_torch_in_every_set_of_arguments(run, shapes):
    for asked in itertools.product([False, True], repeat=len(shapes)):
        if not any(asked):
            continue
        tensors = [normal(*shape, seed=10 + i) for i, shape in enumerate(shapes)]
        leaves = [t.requires_grad_(ask) for t, ask in zip(tensors, asked, strict=True)]
        expected_outputs, expected = hessian_product(run, leaves)
        with TwiceDifferentiable():
            outputs, found = hessian_product(run, leaves)
        assert type(outputs.grad_fn) is not type(expected_outputs.grad_fn)
        torch.testing.assert_close(outputs, expected_outputs, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


class OtherTensor(torch.Tensor):
    """A kind of tensor with operations of its own, for all that is known of it."""


AS_THEY_ARE = {
    "convolution of one image": conv((4, 5, 5), (6, 4, 3, 3), (6,)),
    "convolution with a padding in words": conv((3, 4, 5, 5), (6, 4, 3, 3), (6,), padding="same"),
    "batch norm in train mode": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [(3, 4, 5), (4,), (4,)]),
    "batch norm without weight": (
        lambda x: F.batch_norm(x, normal(4, seed=1), normal(4, seed=2).exp()),
        [(3, 4, 5)],
    ),
    "ReLU in place": (lambda x: F.relu(x * 1, inplace=True), [(3, 4, 5)]),
    "ReLU of another kind of tensor": (lambda x: F.relu(x.as_subclass(OtherTensor)), [(3, 4, 5)]),
}


@pytest.mark.parametrize(("run", "shapes"), AS_THEY_ARE.values(), ids=AS_THEY_ARE)
def test_other_calls_are_left_as_they_are(run, shapes):
    leaves = [normal(*shape, seed=10 + i).requires_grad_() for i, shape in enumerate(shapes)]
    expected_outputs, expected = hessian_product(run, leaves)
    with TwiceDifferentiable():
        outputs, found = hessian_product(run, leaves)
    assert type(outputs.grad_fn) is type(expected_outputs.grad_fn)
    assert all(map(torch.equal, found, expected))


class Network(nn.Module):
    """Convolutions, batch norms with statistics of their own, a shortcut, and ReLUs: 107 weights."""

    def __init__(self, run=lambda body, x: body(x)):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.second, self.linear = nn.Conv2d(3, 1, 3, padding=1), nn.Linear(3, 5)
        self.run = run
        for buffer in (self.norm.running_mean, self.norm.running_var):
            buffer.uniform_(0.5, 1.5)
        self.eval()

    def forward(self, x):
        return self.run(self.body, x)

    def body(self, x):
        hidden = F.relu(self.norm(self.first(x)))
        return self.linear(torch.relu(hidden + self.second(hidden)).mean((2, 3)))


def images():
    torch.manual_seed(1)
    return torch.randn(7, 2, 4, 4), torch.randint(5, (7,))


def autocast(body, x):
    with torch.autocast("cpu", torch.bfloat16):
        return body(x)


@pytest.mark.parametrize("sizes", [(7,), (4, 3)])
@pytest.mark.parametrize("names", [None, ["norm.weight", "norm.bias"], ["first.weight"], ["second.bias"]])
def test_products_with_a_network_of_convolutions_are_those_of_its_dense_hessian(sizes, names):
    (x, y), loss_fn = images(), nn.CrossEntropyLoss()
    model = Network()
    before = everything(model)
    op = HessianOperator(model, loss_fn, list(zip(x.split(sizes), y.split(sizes), strict=True)), params=names)
    H = dense_hessian(Network().double(), loss_fn, [(x.double(), y)], names)
    torch.testing.assert_close((op @ torch.eye(op.dim)).double(), H, rtol=1e-4, atol=1e-6)
    assert_untouched(model, before)


def test_products_use_the_fast_second_derivatives(monkeypatch):
    calls = []
    gradients = _Convolution.gradients
    monkeypatch.setattr(
        _Convolution, "gradients", lambda self, g, x, *rest: calls.append(x) or gradients(self, g, x, *rest)
    )
    op = HessianOperator(Network(), nn.CrossEntropyLoss(), [images()])
    op @ torch.ones(op.dim)
    calls.clear()
    op @ torch.ones(op.dim)
    assert len(calls) == 3  # the first convolution has no gradient in the images, whose derivative would be the fourth
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x in calls)


def test_a_checkpoint_finds_the_same_operations_when_it_runs_again():
    plain, kept = (
        HessianOperator(model, nn.CrossEntropyLoss(), [images()])
        for model in (Network(), Network(lambda body, x: checkpoint(body, x, use_reentrant=False)))
    )
    v = torch.ones(plain.dim)
    torch.testing.assert_close(kept @ v, plain @ v, rtol=1e-4, atol=1e-6)


def test_a_model_that_casts_keeps_the_precision_of_its_operations(monkeypatch):
    op = HessianOperator(Network(autocast), nn.CrossEntropyLoss(), [images()])
    found = op @ torch.ones(op.dim)
    monkeypatch.setattr("flatmin.measures.double_backward.STAND_INS", {})
    again = HessianOperator(Network(autocast), nn.CrossEntropyLoss(), [images()]) @ torch.ones(op.dim)
    assert torch.equal(found, again)
