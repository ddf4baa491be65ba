"""Slow, obvious re-derivations of the paper's formulas in float64, written from the paper and from nothing else.

And the closure that loops pass to `step`.
"""

import math

import torch


def closure_of(opt, loss_of):
    """Return a function that zeroes the gradients, computes the loss, calls `backward()` and returns the loss."""

    def closure():
        opt.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    return closure


def flat(tensors):
    return torch.cat([t.detach().double().reshape(-1) for t in tensors])


def unflat(vector, like):
    return [v.view_as(t) for v, t in zip(vector.split([t.numel() for t in like]), like, strict=True)]


def dual_exponent(p):
    """1/p + 1/q = 1."""
    return math.inf if p == 1 else 1.0 if p == math.inf else 1 / (1 - 1 / p)


def eq2(g, rho, p):
    """Equation 2 of the paper for a flat gradient: rho sign(g) |g|^(q-1) / (||g||_q^q)^(1/p)."""
    q = dual_exponent(p)
    if p == 1:  # the limit q -> inf: all on the largest coordinate
        eps = torch.zeros_like(g)
        largest = g.abs().argmax()
        eps[largest] = rho * g[largest].sign()
        return eps
    return rho * g.sign() * g.abs() ** (q - 1) / (g.abs() ** q).sum() ** (1 / p)


def scaled_eq2(g, scale, p):
    """eps = T dual_p(T g), with T a vector."""
    return scale * eq2(scale * g, 1.0, p)


def projection(x, p):
    """Nearest point of the unit p-ball; for p = 1 by sorting (Duchi et al., 2008)."""
    if p == math.inf:
        return x.clamp(-1, 1)
    if p == 2:
        return x / max(1.0, x.norm().item())
    if x.abs().sum() <= 1:
        return x
    ordered = x.abs().sort(descending=True).values
    excess = (ordered.cumsum(0) - 1) / torch.arange(1, len(x) + 1, dtype=x.dtype)
    theta = excess[(ordered > excess).nonzero().max()]
    return x.sign() * (x.abs() - theta).clamp(min=0)


def gradient(loss, w):
    """The gradient of a function of a flat vector."""
    w = w.detach().clone().requires_grad_()
    return torch.autograd.grad(loss(w), w)[0]


def sam_gradient(loss, w, rho, p=2.0, scale=None, steps=1):
    """Equation 3 at a flat w: the gradient at w + eps, with eps from `steps` projected ascent steps."""
    relative = torch.ones_like(w) if scale is None else scale  # a common factor does not change the direction
    scale = torch.full_like(w, rho) if scale is None else scale
    d = eq2(relative * gradient(loss, w), 1.0, p)
    for _ in range(1, steps):
        d = projection(d + eq2(relative * gradient(loss, w + scale * d), 1.0, p), p)
    return gradient(loss, w + scale * d), scale * d


def gauss_newton(outputs, loss, w):
    """J^T H J at a flat w: J the Jacobian of all outputs, H the Hessian of the loss in them, both as matrices."""
    z = outputs(w)
    J = torch.autograd.functional.jacobian(outputs, w).reshape(z.numel(), w.numel())
    H = torch.autograd.functional.hessian(lambda flat: loss(flat.view_as(z)), z.detach().flatten())
    return J.T @ H @ J
