"""Functions for `direction` and `combine`, and what processes do with them in test_step_functions_of_workers.py."""

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import fsdp_cases
from flatmin import SAM


def roots(grads):
    return [g.sign() * g.abs().sqrt() for g in grads]


def surrogate_gap(grads, perturbed, alpha=0.4):
    along = sum((g * q).sum() for g, q in zip(grads, perturbed, strict=True))
    along = along / sum((q * q).sum() for q in perturbed)
    return [q - alpha * (g - along * q) for g, q in zip(grads, perturbed, strict=True)]


class ElementwiseRoots:
    elementwise = True

    def __init__(self):
        self.num_calls = 0

    def __call__(self, grads):
        self.num_calls += 1
        return roots(grads)

    def state_dict(self):
        return {"num_calls": self.num_calls}

    def load_state_dict(self, state):
        self.num_calls = state["num_calls"]


class ElementwiseMinimum:
    """Of both gradients, the one with the smaller absolute value."""

    elementwise = True

    def __call__(self, grads, perturbed):
        return [torch.where(g.abs() < q.abs(), g, q) for g, q in zip(grads, perturbed, strict=True)]


def errors_with_shards(rank):
    model = fsdp_cases.sharded_model()
    messages = []
    for function in ({"direction": roots}, {"combine": surrogate_gap}):
        try:
            SAM(torch.optim.SGD(model.parameters(), lr=0.1), **function)
        except ValueError as error:
            messages.append(str(error))
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), direction=ElementwiseRoots())
    assert opt.state_dict()["param_groups"][0]["sam_direction"] == {"num_calls": 0}
    try:
        get_optimizer_state_dict(model, opt)
    except ValueError as error:
        messages.append(str(error))
    return messages
