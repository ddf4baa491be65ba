"""A loss of three weights with SAM around SGD, for tests of loops."""

import torch
from torch import nn

import references
from flatmin import SAM


def make(**settings):
    torch.manual_seed(0)
    w = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    return w, SAM(torch.optim.SGD([w], lr=0.1), **({"rho": 0.3} | settings))


def loss_of(w):
    return (w**4).sum() + w[0] * w[1]


def closure_of(w, opt):
    return references.closure_of(opt, lambda: loss_of(w))
