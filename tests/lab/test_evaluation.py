"""Loss and error rates on a whole set."""

import numpy as np
import pytest
import torch
from torch import nn

from flatmin.lab.data.pipeline import Batch
from flatmin.lab.evaluation import evaluate, what_is_evaluated
from flatmin.lab.workers import Workers


def batch(logits, labels):
    inputs, labels = torch.tensor(logits, dtype=torch.float32), torch.tensor(labels)
    examples = np.arange(len(labels))
    return Batch(
        number=0, examples=examples, inputs=inputs, labels=labels, partner_labels=labels, own_weight=1.0, share=1.0
    )


def test_the_five_best_guesses_count_and_a_short_batch_counts_by_its_size():
    falling = [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]  # ranks: class 0 is the best guess, class 4 the fifth
    batches = [batch([falling] * 3, [0, 4, 5]), batch([falling], [6])]
    workers = Workers(device=torch.device("cpu"))
    found = evaluate(nn.Identity(), batches, ("loss", "error", "top5_error"), "float32", workers)
    log_sum = torch.tensor(falling, dtype=torch.float64).logsumexp(0).item()
    assert found["error"] == pytest.approx(3 / 4)
    assert found["top5_error"] == pytest.approx(2 / 4)
    assert found["loss"] == pytest.approx(log_sum - (7 + 3 + 2 + 1) / 4)


def test_top_5_is_counted_where_there_are_many_classes():
    assert what_is_evaluated(10) == ("loss", "error")
    assert what_is_evaluated(100) == ("loss", "error", "top5_error")
