r"""SAM's ascent steps as pure functions: the p-norm dual, random directions, projections on the ball.

All of it is a direction :math:`d` in the unit p-ball, joint over every tensor, and a scale :math:`T`, so that the
perturbation is :math:`\epsilon = T \odot d`. With :math:`T = \rho` that is Eq. 2 of Foret et al. (2021); with
:math:`T = \rho (|w| + \eta)` it is ASAM (Kwon et al., 2021); with a :math:`T` for each parameter group, a radius each.

The norms are kept as a *row* ``(peak, total)`` with :math:`\lVert u \rVert_q = peak \cdot total^{1/q}`, because the
powers of a gradient of 1e-30 or 1e25 do not fit into float32. Rows of different tensors, or of the shards of one
tensor on different machines, are merged by :func:`join`.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flatmin.core.checks import check_p, check_rho

Gather = Callable[[Sequence[Tensor]], Tensor]
"""Takes the rows of the local tensors, returns the rows of all tensors (of all shards) as a matrix (n, 2)."""

L1_PROJECTION_STEPS = 60  # Newton's iterations on a piecewise linear function; 5 to 15 are needed in practice


def dual_exponent(p: float) -> float:
    """Return q with 1/p + 1/q = 1.

    Example:
        >>> dual_exponent(2.0), dual_exponent(1.0), dual_exponent(math.inf)
        (2.0, inf, 1.0)
    """
    if p == 1:
        return math.inf
    return 1.0 if math.isinf(p) else p / (p - 1)


def working_copy(tensor: Tensor) -> Tensor:
    """Return a copy to compute in: dense, real (complex numbers are pairs), of float32 or better."""
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.to(working_dtype(tensor.dtype), copy=True)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a perturbation of weights of this dtype is computed."""
    return torch.promote_types(dtype, torch.float32)


def row_(u: Tensor, q: float) -> Tensor:
    r"""Return ``(peak, total)`` with :math:`\lVert u \rVert_q = peak \cdot total^{1/q}`, overwriting u.

    The powers are taken after division by the peak, in place, because temporary tensors of this size would be what SAM
    needs most memory for. For q = inf, ``total`` counts the largest coordinates. A non-finite u gives a non-finite row.
    """
    wide = torch.float32 if u.device.type == "mps" else torch.float64
    if u.numel() == 0:
        return u.new_zeros(2, dtype=wide)
    peak = u.abs_().amax()
    if math.isinf(q):
        return torch.stack([peak, (u == peak).sum(dtype=u.dtype)]).to(wide)
    return torch.stack([peak, u.div_(_nonzero(peak)).pow_(q).sum()]).to(wide)


def join(rows: Tensor, q: float) -> Tensor:
    r"""Merge rows (n, 2) of parts into the whole's row: :math:`\lVert u \rVert_q^q = \sum_i \lVert u_i \rVert_q^q`.

    Example:
        >>> both = join(torch.stack([row_(torch.tensor([3.0]), 2), row_(torch.tensor([4.0]), 2)]), 2)
        >>> norm(both, 2).item()
        5.0
    """
    peak = rows[:, 0].amax()
    share = rows[:, 0] == peak if math.isinf(q) else (rows[:, 0] / _nonzero(peak)).pow(q)
    return torch.stack([peak, (rows[:, 1] * share).sum()])


def joint_row(tensors: Sequence[Tensor], q: float) -> Tensor:
    """Return the row of several tensors together, on the device of the first."""
    rows = [row_(working_copy(u), q) for u in tensors]
    return join(torch.stack([r.to(rows[0].device, non_blocking=True) for r in rows]), q)


def norm(joint: Tensor, q: float) -> Tensor:
    """Return the q-norm that a row stands for, a scalar tensor on its device."""
    return joint[0] if math.isinf(q) else joint[0] * joint[1].pow(1 / q)


def dual(p: float, joint: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    r"""Return the function that replaces a part u of a vector, in place, by its part of the dual unit vector.

    That is Eq. 2 with rho = 1, :math:`\operatorname{sign}(u) |u|^{q-1} / (\lVert u \rVert_q^q)^{1/p}`: the unit d
    that maximizes :math:`\langle d, u \rangle`, with the norm of the whole vector. Where that is 0 or not finite the
    result is exactly 0, decided on the device. For p = 1, coordinates that share the largest magnitude share the step:
    the limit of Eq. 2.

    Args:
        p: the norm of the ball.
        joint: the joint row of the whole vector, for the dual exponent q.
        dtype: of the parts, float32 or better.

    Returns:
        A function of a part, which it overwrites and returns.
    """
    exponent = dual_exponent(p) - 1
    peak = _nonzero(joint[0])
    factor = _reciprocal(norm(joint, 2), dtype) if p == 2 else joint[1].pow(-1 / p)
    factor = _zero_unless_usable(factor, joint)

    def apply_(u: Tensor) -> Tensor:
        if math.isinf(p):
            u.sign_()
        elif p == 1:
            u.mul_(u.abs() == peak).sign_()
        elif p != 2:
            magnitude = u.abs().div_(peak).pow_(exponent)
            u.sign_().mul_(magnitude)
        return _times(u, factor)

    return apply_


def unit(p: float, joint: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    r"""Return the function that replaces a part u, in place, by :math:`u / \lVert u \rVert_p` (0 as for `dual`)."""
    factor = _zero_unless_usable(_reciprocal(norm(joint, p), dtype), joint)
    return lambda u: _times(u, factor)


def project_(points: Sequence[Tensor], p: float, *, radius: float = 1.0, gather: Gather | None = None) -> None:
    r"""Move points, in place, to the nearest point (Euclidean) of the joint p-ball of that radius, p in {1, 2, inf}.

    For p = 1 the projection is a soft threshold :math:`\theta` with
    :math:`\sum_i \max(|x_i| - \theta, 0) = radius` (Duchi et al., 2008), found by Newton's method on this convex,
    piecewise linear function, which from the left ends after finitely many steps and needs no sorting.

    Example:
        >>> x = torch.tensor([3.0, 4.0])
        >>> project_([x], 2)
        >>> x
        tensor([0.6000, 0.8000])
    """
    gather = gather or (lambda rows: torch.stack(list(rows)))
    if math.isinf(p):
        for x in points:
            x.clamp_(-radius, radius)
        return
    if p == 2:
        squares = gather([torch.linalg.vector_norm(x).square().reshape(1) for x in points])
        factor = (radius / squares.sum().sqrt()).clamp(max=1)
        for x in points:
            x.mul_(factor.to(x.device, non_blocking=True))
        return
    if p != 1:
        raise ValueError(f"With several steps p must be 1, 2 or inf, got {p}: no projection is implemented for others.")
    theta = points[0].new_zeros(())
    for _ in range(L1_PROJECTION_STEPS):
        sums = []
        for x in points:
            magnitude = x.abs()
            active = magnitude > theta.to(x.device, non_blocking=True)
            sums.append(torch.stack([(magnitude * active).sum(), active.sum(dtype=x.dtype)]))
        total, count = gather(sums).sum(dim=0)
        theta = torch.maximum(theta, (total - radius) / count.clamp(min=1))
    for x in points:
        x.copy_(x.sign() * (x.abs() - theta.to(x.device, non_blocking=True)).clamp_(min=0))


def adaptive_scale(weight: Tensor, rho: float, eta: float | None) -> Tensor | float:
    r"""Return T: rho, or ASAM's :math:`\rho (|w| + \eta)` where eta is given (in the working dtype)."""
    return rho if eta is None else working_copy(weight).abs_().add_(eta).mul_(rho)


def ascent_step(
    grads: Sequence[Tensor],
    *,
    rho: float = 0.05,
    p: float = 2.0,
    scales: Sequence[Tensor | float] | None = None,
) -> list[Tensor]:
    r"""Return SAM's step :math:`\hat\epsilon = \rho \operatorname{sign}(g) |g|^{q-1} / (\lVert g \rVert_q^q)^{1/p}`.

    It maximizes the linearized loss over the p-ball of radius rho (Foret et al., 2021, Eq. 2). The norm is joint over
    all tensors, not per tensor. A zero or non-finite gradient gives a zero step.

    Args:
        grads: the gradient, a tensor for each parameter.
        rho: the radius; not used where ``scales`` are given.
        p: the norm of the ball, in [1, inf].
        scales: T of each tensor, for separate radii or for ASAM: :math:`\epsilon = T \odot dual_p(T \odot g)`.

    Returns:
        The step, in the shapes and dtypes of ``grads``.

    Example:
        >>> ascent_step([torch.tensor([3.0]), torch.tensor([4.0])], rho=0.5)
        [tensor([0.3000]), tensor([0.4000])]
    """
    scales = [check_rho(rho)] * len(grads) if scales is None else scales
    directions = ascent_direction(grads, p=p, scales=scales)
    return apply_scales(directions, scales, like=grads)


def ascent_direction(grads: Sequence[Tensor], *, p: float, scales: Sequence[Tensor | float]) -> list[Tensor]:
    r"""Return :math:`d = dual_p(T \odot g)`, of joint p-norm 1, in the working dtype."""
    p, q = check_p(p), dual_exponent(p)
    if not grads:
        return []
    scaled = [working_copy(g).mul_(t) for g, t in zip(grads, scales, strict=True)]
    joint = joint_row(scaled, q)
    return [dual(p, joint.to(u.device), u.dtype)(u) for u in scaled]


def apply_scales(
    directions: Sequence[Tensor], scales: Sequence[Tensor | float], *, like: Sequence[Tensor]
) -> list[Tensor]:
    r"""Return :math:`\epsilon = T \odot d`, in the dtypes of the tensors it belongs to."""
    steps = [d * t for d, t in zip(directions, scales, strict=True)]
    return [
        (torch.view_as_complex(step) if tensor.is_complex() else step).to(tensor.dtype)
        for step, tensor in zip(steps, like, strict=True)
    ]


def random_step(
    like: Sequence[Tensor],
    *,
    rho: float = 0.05,
    p: float = 2.0,
    scales: Sequence[Tensor | float] | None = None,
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    r"""Return a Gaussian direction of p-norm rho, :math:`\rho z / \lVert z \rVert_p` (Foret et al., Appendix C.5).

    The paper prints :math:`\rho / \lVert z \rVert_2^2`, a slip: its text asks for "a fixed Euclidean norm".

    Args:
        like: tensors whose shapes, dtypes and devices the step gets.
        rho: the radius; not used where ``scales`` are given.
        p: the norm of the ball, in [1, inf].
        scales: T of each tensor: :math:`\epsilon = T \odot z / \lVert z \rVert_p`.
        generator: where the noise comes from; torch's default generator if None.

    Example:
        >>> (step,) = random_step([torch.zeros(1000)], rho=0.5, generator=torch.Generator().manual_seed(0))
        >>> round(step.norm().item(), 4)
        0.5
    """
    p = check_p(p)
    if not like:
        return []
    scales = [check_rho(rho)] * len(like) if scales is None else scales
    noise = [working_copy(t).normal_(generator=generator) for t in like]
    joint = joint_row(noise, p)
    return apply_scales([unit(p, joint.to(z.device), z.dtype)(z) for z in noise], scales, like=like)


def _zero_unless_usable(factor: Tensor, joint: Tensor) -> Tensor:
    # No direction can be made of a vector that is all zero or somewhere not finite.
    return torch.where((joint.isfinite() & (joint > 0)).all(), factor, 0.0)


def _times(u: Tensor, factor: Tensor) -> Tensor:
    # 0 * inf is NaN, where factor is 0 because u is not finite; otherwise there is nothing to replace.
    return u.mul_(factor).nan_to_num_(0.0, 0.0, 0.0)


def _reciprocal(size: Tensor, dtype: torch.dtype) -> Tensor:
    # A subnormal gradient has a reciprocal norm beyond its dtype; the step is then shorter, but finite.
    return size.reciprocal().clamp(max=torch.finfo(dtype).max)


def _nonzero(peak: Tensor) -> Tensor:
    # 0 / 0 would be NaN where all is zero; NaN and inf stay as they are.
    return torch.where(peak == 0, torch.ones_like(peak), peak)
