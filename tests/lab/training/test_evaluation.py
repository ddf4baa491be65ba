"""Loss and error rates on a whole set."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import worker_cases
from flatmin.lab.data.pipeline import Batch
from flatmin.lab.training.distributed import Workers
from flatmin.lab.training.evaluation import evaluate, what_is_evaluated


def batch(logits, labels):
    inputs, labels = torch.tensor(logits, dtype=torch.float32), torch.tensor(labels)
    examples = np.arange(len(labels))
    return Batch(
        number=0, examples=examples, inputs=inputs, labels=labels, partner_labels=labels, own_weight=1.0, share=1.0
    )


def test_the_five_best_guesses_count_and_a_short_batch_counts_by_its_size():
    falling = [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]  # ranks: class 0 is the best guess, class 4 the fifth
    batches = [batch([falling] * 3, [0, 4, 3]), batch([falling], [6])]
    workers = Workers(device=torch.device("cpu"))
    found = evaluate(nn.Identity(), batches, ("loss", "error", "top5_error"), "float32", workers)
    log_sum = torch.tensor(falling, dtype=torch.float64).logsumexp(0).item()
    assert found["error"] == pytest.approx(3 / 4)
    assert found["top5_error"] == pytest.approx(1 / 4)
    assert found["loss"] == pytest.approx(log_sum - (7 + 3 + 4 + 1) / 4)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_network_is_called_as_at_test_time_in_the_precision_of_the_run(precision):
    seen = []

    class Network(nn.Module):
        def forward(self, x):
            seen.append((self.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
            return x

    evaluate(Network(), [batch([[1.0, 0.0]], [0])], ("loss", "error"), precision, Workers(device=torch.device("cpu")))
    assert seen == [(False, False, precision == "bfloat16")]


def test_the_examples_of_all_workers_count():
    """A companion with three examples, all of them wrong and of loss 2, beside one that is right."""

    class Two(Workers):
        def sum(self, values):
            return values + torch.tensor([3.0, 3 * 2.0, 3.0])

    found = evaluate(
        nn.Identity(), [batch([[1.0, 0.0]], [0])], ("loss", "error"), "float32", Two(device=torch.device("cpu"))
    )
    assert found["error"] == pytest.approx(3 / 4)
    assert found["loss"] == pytest.approx((3 * 2 + math.log1p(math.exp(-1))) / 4)


def test_top_5_is_counted_where_there_are_many_classes():
    assert what_is_evaluated(10) == ("loss", "error", "ece")
    assert what_is_evaluated(100) == ("loss", "error", "ece", "top5_error")


def slow_calibration_error(logits, labels, num_bins=15):
    """Sort by confidence, cut into bins of equal size, and weigh |accuracy - confidence| of each by its size."""
    rows = []
    for row, label in zip(logits, labels, strict=True):
        exponentials = [math.exp(value - max(row)) for value in row]
        rows.append((max(exponentials) / sum(exponentials), float(row.index(max(row)) == label)))
    ties = {c: [right for other, right in rows if other == c] for c, _ in rows}
    rows = sorted((c, sum(ties[c]) / len(ties[c])) for c, _ in rows)
    total = 0.0
    for number in range(num_bins):
        own = rows[len(rows) * number // num_bins : len(rows) * (number + 1) // num_bins]
        if own:
            confidence, accuracy = (sum(column) / len(own) for column in zip(*own, strict=True))
            total += len(own) / len(rows) * abs(accuracy - confidence)
    return total


@pytest.mark.parametrize("size", [1, 7, 15, 203])
@pytest.mark.parametrize("ties", [False, True])
def test_calibration_error_is_the_slow_one_over_bins_of_equal_mass(size, ties):
    generator = np.random.default_rng(size)
    logits = 1.5 * generator.standard_normal((size, 3))
    if ties:
        logits[: size // 2] = [30.0, 0.0, -1.0]  # as confident as can be, right or wrong
    # Right in two of three cases, however confident: too confident in some bins, not enough in others.
    labels = np.where(generator.random(size) < 0.5, logits.argmax(1), generator.integers(3, size=size))
    logits = logits.astype(np.float32)
    cuts = [0, size // 3, size]
    batches = [batch(logits[a:b], labels[a:b]) for a, b in itertools.pairwise(cuts) if b > a]
    expected = slow_calibration_error(logits.astype(float).tolist(), labels)
    for order in (batches, batches[::-1]):  # the order of examples does not matter
        found = evaluate(nn.Identity(), order, ("loss", "error", "ece"), "float32", Workers(device=torch.device("cpu")))
        assert found["ece"] == pytest.approx(expected, rel=1e-12)


def test_calibration_error_is_one_of_all_workers_examples(two_processes):
    logits, labels = worker_cases.predictions()
    expected = slow_calibration_error(logits.double().tolist(), labels.tolist())
    assert two_processes.run(worker_cases.evaluated_ece) == [pytest.approx(expected, rel=1e-12)] * 2
