"""The gradient of several micro-batches, each with its own perturbation, and of a rest without one."""

import dataclasses

import torch
from torch import Tensor

from flatmin.core import ddp
from flatmin.core.gradients import GradientSum
from flatmin.core.pass_state import ModelState
from flatmin.core.step_passes import Closure, SAMPasses, Share, StepPasses
from flatmin.core.step_state import plain_metrics, weighted_mean


def micro_batch_gradient(
    passes: StepPasses, closures: list[Closure], rest: Closure | None, shares: list[float]
) -> SAMPasses:
    r"""Leave the gradient of a batch in the parameters, reduced over the workers, and return what was measured.

    With shares :math:`s_i` of the closures, :math:`s_r` of the rest, and c the weight of the correction, that is

    .. math:: \sum_i s_i \left( g_i(w) + c\, (g_i(w + \epsilon_i) - g_i(w)) \right) + s_r g_r(w),

    where c is 1 without a rest and :math:`1 / \sum_i s_i` with one: the correction keeps SAM's strength. With
    ``combine``, its result for each closure takes the place of :math:`g_i(w + \epsilon_i)`. The shares sum to 1.
    """
    is_plain = not passes.needs_perturbed_pass()
    if rest is not None and passes.settings.direction == "momentum":
        raise ValueError('rest saves nothing with direction="momentum", whose step is one pass. Leave it out.')
    own = shares[: len(closures)]
    corrected = sum(own) if rest is not None else 1.0
    weight = passes.settings.correction_weight(corrected)
    total = GradientSum(list(passes.parameters()))
    before = ModelState(passes.state.model, passes.parameters())
    measured: list[SAMPasses] = []
    try:
        for closure, share in zip(closures, own, strict=True):
            if is_plain:
                loss = passes.run(closure, reduce=False)
                measured.append(SAMPasses(plain_metrics(loss), loss))
                total.take(share)
            else:
                if rest is not None and measured:
                    before.begin_again()  # as for the rest: all start from the same state
                in_total = Share(total, share, weight)
                measured.append(passes.sam_gradient(closure, share=in_total, keep_state=rest is None))
        metrics = weighted_mean([one.metrics for one in measured], [share / corrected for share in own])
        loss = torch.stack([one.loss * share for one, share in zip(measured, own, strict=True)]).sum()
        if rest is None:
            put_reduced(passes, total)
            return SAMPasses(metrics, loss)
        before.begin_again()  # the few examples of a part would make noisy statistics: the rest's count
        rest_loss = shares[-1] * _add_rest(passes, rest, shares[-1], total)
    except BaseException:
        before.restore()
        raise
    return SAMPasses(dataclasses.replace(metrics, loss=corrected * metrics.loss + rest_loss), loss + rest_loss)


def put_reduced(passes: StepPasses, total: GradientSum) -> None:
    """Make a sum of gradients the parameters' gradients, averaged over workers that do not share them yet."""
    total.put()
    ddp.reduce_gradients(passes.parameters(), passes.state.model)


def _add_rest(passes: StepPasses, rest: Closure, share: float, total: GradientSum) -> Tensor:
    """Run the plain pass, leave the gradient of the whole batch, and return the rest's loss."""
    model = ddp.unwrap(passes.state.model)
    if ddp.is_parallel() and hasattr(model, "no_sync") and not getattr(model, "find_unused_parameters", False):
        total.put(1 / share)  # DDP adds the rest's gradient to it, and reduces the sum while it computes
        loss = passes.run_keeping_gradients(rest)
        with torch.no_grad():
            torch._foreach_mul_([p.grad for p in passes.parameters() if p.grad is not None], share)
        return loss
    loss = passes.run(rest, reduce=False)
    total.take(share)
    put_reduced(passes, total)
    return loss
