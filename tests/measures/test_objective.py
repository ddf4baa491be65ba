import math
import random
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flatmin.core.compat import TORCH
from flatmin.measures import (
    HessianOperator,
    loss_landscape,
    m_sharpness,
    pac_bayes_bound,
    sam_update_cosine,
    spectral_density,
    top_eigenvalues,
)
from flatmin.measures.objective import Objective, error_rate
from measures import cases
from measures.cases import assert_untouched, everything, tanh_network, whole


def first_batch(data):
    return next(iter(data))


MEASURES = {
    "m_sharpness": lambda *case, **more: m_sharpness(*case, m=3, **more),
    "m_sharpness of all": lambda *case, **more: m_sharpness(*case, steps=2, **more),
    "top_eigenvalues": lambda *case, **more: top_eigenvalues(HessianOperator(*case, **more), k=2),
    "trace": lambda *case, **more: HessianOperator(*case, **more).trace(probes=2),
    "spectral_density": lambda *case, **more: spectral_density(HessianOperator(*case, **more), steps=3),
    "loss_landscape": lambda *case, **more: loss_landscape(*case, points=3, **more),
    "loss_landscape of batches": lambda *case, **more: loss_landscape(
        *case, points=3, batch_norm="batch", directions="hessian", **more
    ),
    "pac_bayes_bound": lambda *case, **more: pac_bayes_bound(*case, rho=0.05, metric="error", **more),
    "sam_update_cosine": lambda model, loss_fn, data, **more: sam_update_cosine(
        model, loss_fn, first_batch(data), rho=0.05, **more
    ),
}
each_measure = pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)


def network(seed=0):
    """Batch norm, dropout, a frozen layer, gradients from before, and mixed train and eval modes."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    model(torch.randn(8, 4, dtype=torch.float64)).sum().backward()
    model[4].bias.requires_grad_(False)
    model.eval()
    model[0].train()
    model[2].train()
    x, y = torch.randn(14, 4, dtype=torch.float64), torch.randint(3, (14,))
    return model, nn.CrossEntropyLoss(), list(zip(x.split((6, 6, 2)), y.split((6, 6, 2)), strict=True))


@each_measure
def test_tf32_is_off_while_measuring_and_as_before_afterwards(measure):
    backends = torch.backends
    if TORCH >= (2, 9):
        name, on, off, owners = "fp32_precision", "tf32", "ieee", (backends.cuda.matmul, backends.cudnn.conv)
    else:
        name, on, off, owners = "allow_tf32", True, False, (backends.cuda.matmul, backends.cudnn)
    usual = [getattr(owner, name) for owner in owners]
    seen = []
    model, loss_fn, data = network()
    model.register_forward_hook(lambda *_: seen.append([getattr(owner, name) for owner in owners]))
    try:
        for owner in owners:
            setattr(owner, name, on)
        measure(model, loss_fn, data)
        assert [getattr(owner, name) for owner in owners] == [on, on]
    finally:
        for owner, value in zip(owners, usual, strict=True):
            setattr(owner, name, value)
    assert seen
    assert all(now == [off, off] for now in seen)


@each_measure
def test_the_model_is_left_as_it_was(measure):
    case = network()
    before = everything(case[0])
    measure(*case)
    assert_untouched(case[0], before)


@each_measure
@pytest.mark.parametrize("passes", [0, 3, 5])
def test_the_model_is_left_as_it_was_after_an_exception(measure, passes):
    """In the checks, and in the work after them."""
    model, loss_fn, data = network()
    before = everything(model)
    left = passes

    def failing(outputs, targets):
        nonlocal left
        left -= 1
        if left < 0:
            torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
            raise RuntimeError("out of memory")
        return loss_fn(outputs, targets)

    with pytest.raises(RuntimeError, match="out of memory"):
        measure(model, failing, data)
    assert_untouched(model, before)


@each_measure
def test_a_loader_leaves_the_random_state_alone(measure):
    model, loss_fn, data = network()
    ((x, y),) = whole(data)
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(TensorDataset(x, y), batch_size=6, generator=generator)
    state = generator.get_state()
    before = everything(model)
    measure(model, loss_fn, loader)
    assert_untouched(model, before)
    if measure is not MEASURES["sam_update_cosine"]:  # the test itself took its batch
        assert torch.equal(state, generator.get_state())


def test_measuring_leaves_training_exactly_as_it_would_have_been():
    def train(measured):
        model, loss_fn, data = network()
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for x, y in data:
            if measured:
                model.eval()
                m_sharpness(model, loss_fn, data, m=4)
                top_eigenvalues(HessianOperator(model, loss_fn, data), k=1)
                model.train()
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(train(False), train(True))


@each_measure
def test_dropout_in_train_mode_is_refused_with_the_remedy(measure):
    model, loss_fn, data = network()
    model[3].train()
    with pytest.raises(ValueError, match=r"The model is nondeterministic \(dropout.*Call model.eval\(\) first"):
        measure(model, loss_fn, data)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(6), nn.BatchNorm1d(6, track_running_stats=False).eval()])
def test_batch_norm_with_batch_statistics_is_refused_with_the_remedy(layer):
    model, loss_fn, data = network()
    model[1] = layer.double()
    with pytest.raises(ValueError, match=r"batch norm layer '1'.*Call model.eval\(\) first"):
        m_sharpness(model, loss_fn, data)


def test_noise_of_ones_own_generator_is_refused():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.generator = torch.Generator().manual_seed(0)

        def forward(self, x):
            return x @ self.weight + torch.randn(len(x), generator=self.generator)

    with pytest.raises(ValueError, match="The model is nondeterministic"):
        m_sharpness(Noisy(), lambda o, t: (o**2).mean(), [(torch.ones(4, 3), torch.zeros(4))])


def test_a_buffer_that_changes_is_refused():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return x @ self.weight

    model = Counting()
    case = (model, lambda o, t: (o**2).mean(), [(torch.ones(4, 3), torch.zeros(4))])
    with pytest.raises(ValueError, match="changes its buffer 'calls'"):
        m_sharpness(*case)
    m_sharpness(*case, allow_nondeterministic=True)
    assert model.calls == 0


class Augmented(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.full((4,), float(index)) + torch.rand(4), index % 3


@each_measure
def test_data_that_is_shuffled_or_augmented_is_refused_with_the_remedy(measure):
    if measure is MEASURES["sam_update_cosine"]:
        pytest.skip("it takes one batch, which is fixed")
    model, loss_fn, data = network()
    model.float()
    ((x, y),) = whole(data)
    shuffled = DataLoader(TensorDataset(x.float(), y), batch_size=5, shuffle=True)
    for loader in (shuffled, DataLoader(Augmented(), batch_size=3)):
        with pytest.raises(ValueError, match=r"data differs from pass to pass.*shuffle=False"):
            measure(model, loss_fn, loader)


def test_allowed_noise_is_the_same_in_every_pass():
    """With fixed noise the Hessian is symmetric, and sharpness at rho = 0 is exactly zero."""
    model, loss_fn, data = network()
    model.train()
    ((x, y),) = whole(data)
    loader = DataLoader(TensorDataset(x, y), batch_size=5, shuffle=True)
    assert m_sharpness(model, loss_fn, loader, rho=0.0, allow_nondeterministic=True).mean == 0.0
    op = HessianOperator(model, loss_fn, loader, allow_nondeterministic=True)
    u, v = torch.randn(2, op.dim, dtype=torch.float64)
    assert float(u @ (op @ v)) == pytest.approx(float(v @ (op @ u)), rel=1e-9)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([], ValueError, "data is empty"),
        ([(torch.ones(0, 4), torch.ones(0))], ValueError, "data is empty"),
        (iter([(torch.ones(2, 4), torch.zeros(2))]), TypeError, r"one-shot iterator.*Pass list\(data\)"),
        ((b for b in []), TypeError, "one-shot iterator"),
        (torch.ones(2, 4), TypeError, r"pass \[\(inputs, targets\)\]"),
        (None, TypeError, "data must be an iterable"),
        ([torch.ones(2, 4)], TypeError, r"batches \(inputs, targets\), got a Tensor"),
        ([(torch.ones(2, 4),)], TypeError, "got a tuple of length 1"),
        ([("a", "b")], TypeError, "tensors with the examples along dimension 0"),
        ([(torch.ones(2, 4), torch.tensor(1))], TypeError, "tensors with the examples along dimension 0"),
        ([(torch.ones(2, 4), torch.zeros(3).long())], ValueError, r"same number of examples, got \[2, 3\]"),
    ],
)
def test_bad_data_is_refused_by_name(data, error, message):
    model = nn.Linear(4, 2)
    with pytest.raises(error, match=message):
        m_sharpness(model, nn.CrossEntropyLoss(), data)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (nn.CrossEntropyLoss(reduction="sum"), "returns a sum: use reduction='mean'"),
        (nn.CrossEntropyLoss(reduction="none"), r"a scalar tensor, got shape \(2,\)"),
        (lambda outputs, targets: 1.0, "a scalar tensor, got float"),
        (lambda outputs, targets: outputs.mean() * math.nan, "The loss is nan at the weights"),
    ],
)
def test_a_loss_that_is_not_a_finite_mean_is_refused(loss_fn, message):
    model, _, data = tanh_network()
    with pytest.raises(ValueError, match=message):
        m_sharpness(model, loss_fn, data)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda x: x, "model must be a torch.nn.Module, got function"),
        (nn.DataParallel(nn.Linear(4, 2)), "wrapped in DataParallel: pass model.module"),
    ],
)
def test_what_is_no_plain_module_is_refused(model, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        m_sharpness(model, nn.CrossEntropyLoss(), [(torch.ones(2, 4), torch.zeros(2).long())])


def test_a_model_without_weights_to_measure_is_refused():
    model = nn.Linear(4, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        m_sharpness(model, nn.CrossEntropyLoss(), [(torch.ones(2, 4), torch.zeros(2).long())])


def test_data_that_shrinks_after_the_first_pass_is_refused():
    class Shrinking:
        def __init__(self):
            self.passes = 0

        def __iter__(self):
            self.passes += 1
            batch = (torch.ones(4, 3), torch.tensor([0, 1, 0, 1]))
            return iter([batch] * (9 if self.passes <= 3 else 8))

    with pytest.raises(ValueError, match="data yielded 32 examples in this pass and 36 in the first"):
        m_sharpness(nn.Linear(3, 2), nn.CrossEntropyLoss(), Shrinking())


def test_ragged_batches_give_the_loss_and_gradient_of_the_whole():
    model, loss_fn, data = tanh_network()
    ragged, all_at_once = Objective(model, loss_fn, data), Objective(model, loss_fn, whole(data))
    (value, grads), (expected, expected_grads) = (o.gradient(o.weights(), error=True) for o in (ragged, all_at_once))
    assert value.loss == pytest.approx(expected.loss, rel=1e-12)
    assert value.error == expected.error
    torch.testing.assert_close(grads, expected_grads, rtol=1e-12, atol=1e-14)
    reference = torch.autograd.grad(loss_fn(model(whole(data)[0][0]), whole(data)[0][1]), list(model.parameters()))
    flat = torch.cat([g.flatten() for g in reference])
    torch.testing.assert_close(grads, flat, rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        for w in ragged.weights():
            assert not w.requires_grad


class Viewing(nn.Module):
    """Counts on the layout of its images: view refuses any other."""

    def __init__(self, flatten):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.linear = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4 * 64, 5)
        self.flatten = flatten

    def forward(self, x):
        return self.linear(self.flatten(torch.tanh(self.conv(x))))


FLATTENINGS = {
    "reshape": (lambda t: t.reshape(len(t), -1), True),
    "view": (lambda t: t.view(len(t), -1), False),
    "as it lies in memory": (lambda t: t.as_strided((len(t), 256), (256, 1)), False),
}


@pytest.mark.parametrize(("flatten", "fast"), FLATTENINGS.values(), ids=FLATTENINGS)
def test_images_are_laid_out_for_speed_only_where_the_model_does_not_mind(flatten, fast):
    model = Viewing(flatten)
    torch.manual_seed(1)
    x, y = torch.randn(6, 3, 8, 8), torch.randint(5, (6,))
    objective = Objective(model, nn.CrossEntropyLoss(), [(x, y)])
    assert objective.channels_last == fast
    with torch.no_grad():
        expected = float(nn.CrossEntropyLoss()(model(x), y))
    assert objective.value(objective.weights()).loss == pytest.approx(expected, rel=1e-5)
    wide = Viewing(flatten).double()
    assert not Objective(wide, nn.CrossEntropyLoss(), [(x.double(), y)]).channels_last
    found, exact = (
        m_sharpness(m, nn.CrossEntropyLoss(), [(data, y)]).mean for m, data in ((model, x), (wide, x.double()))
    )
    assert found == pytest.approx(exact, rel=1e-3)


def test_error_rates_of_classes_of_maps_and_of_soft_targets():
    logits = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
    labels = torch.tensor([1, 0, 0, 0])
    assert error_rate(logits, labels) == 0.25
    assert error_rate(logits, torch.nn.functional.one_hot(labels, 2).float()) == 0.25
    assert error_rate(logits[:, :, None].expand(4, 2, 5), labels[:, None].expand(4, 5)) == 0.25
    assert error_rate(logits, labels.bool()) == 0.25
    none = [
        *((torch.ones(4), labels), (torch.ones(4, 1, 2), torch.ones(4)), ("a", labels)),
        (torch.ones(4, 1), labels),  # one logit
        (torch.ones(4, 1), torch.ones(4, 1)),  # a regression
        (logits, torch.randn(4, 2)),  # several of them
        (logits, torch.ones(4, 2)),  # several labels at once
        (logits, torch.tensor([1, 0, -100, 0])),  # labels to ignore
        (logits, torch.tensor([1, 0, 2, 0])),
    ]
    for outputs, targets in none:
        with pytest.raises(ValueError, match="For other outputs use metric='loss'"):
            error_rate(outputs, targets)


def test_a_compiled_model_is_measured_as_the_module_it_wraps():
    model, loss_fn, data = tanh_network()
    compiled = torch.compile(model, backend="eager")
    assert m_sharpness(compiled, loss_fn, data).mean == m_sharpness(model, loss_fn, data).mean


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_two_ranks_with_a_shard_each_measure_the_whole(two_processes, tmp_path):
    results = two_processes.run(cases.measured_on_a_shard, str(tmp_path / "cache"))
    model, loss_fn, data = tanh_network()
    expected = cases.measured(whole(data), None)
    for found, again, _, _ in results:
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-7, atol=1e-12, err_msg=name)
        np.testing.assert_array_equal(found["landscape"], again["landscape"])
    ((x, y),) = whole(data)
    own = m_sharpness(model, loss_fn, [(x[:12], y[:12])]).mean  # without group= a rank measures its own shard
    assert results[0][2] == pytest.approx(own, rel=1e-10)
    # What fails on one rank is refused on all; nobody waits for ever.
    reasons = ("rank 1: Every tensor of a batch", "data is empty", "rank 1: The loss is nan", "cannot cross ranks")
    for *_, errors in results:
        for reason, error in zip(reasons, errors, strict=True):
            assert reason in error
