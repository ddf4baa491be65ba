"""The gradient of a step: of one closure, of micro-batches and a rest, or of two visible passes."""

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flatmin.core import ddp
from flatmin.core.checks import Closure, keep_loss
from flatmin.core.gradients import GradientSum
from flatmin.core.pass_state import ModelState
from flatmin.core.step_passes import FirstPass, SAMPasses, Share, StepPasses
from flatmin.core.step_state import SAMMetrics
from flatmin.core.weight_perturber import AscentNorms

USED_WARNING = (
    "Gradients of the previous step were not zeroed, so the ascent direction mixes both. Call opt.zero_grad() before "
    "the first pass."
)

LOST_MICRO_BATCHES = (
    "There were {before} backward passes before `with opt.perturbed():` but {within} within it, so the other "
    "micro-batches would be lost. Run all of them in both passes:\n"
    "    opt.zero_grad()\n"
    "    for x, y in micro_batches:\n"
    "        (loss_fn(model(x), y) / len(micro_batches)).backward()\n"
    "    with opt.perturbed():\n"
    "        for x, y in micro_batches:\n"
    "            (loss_fn(model(x), y) / len(micro_batches)).backward()\n"
    "    opt.step()"
)


def closure_gradient(
    passes: StepPasses, closure: Closure, ascent: Closure | None = None, first: FirstPass | None = None
) -> SAMPasses:
    """Leave the gradient of one closure in the parameters, reduced over the workers, and return what was measured."""
    if not passes.needs_perturbed_pass():
        passes.state.marks.revoke_step()
        return _plain_pass(passes, closure, reduce=True)
    settings, weight = passes.settings, passes.settings.correction_weight()
    if settings.mixes_gradients and ascent is not None:
        mixing = "combine needs" if settings.combine is not None else f"a correction of weight {weight:g} is added to"
        raise ValueError(
            f"ascent has no gradient of the closure at w, which {mixing}. Use "
            "step_batch(part=...) or rest= to save passes, or leave out weight and combine."
        )
    # What is made of gradients of this worker alone is reduced afterwards.
    is_local = settings.combine is not None and not settings.sync_perturbation and ddp.is_parallel()
    share = Share(GradientSum(passes.parameters()), 1.0, weight) if weight != 1.0 or is_local else None
    measured = passes.sam_gradient(closure, ascent=ascent, share=share, first=first)
    if share is not None:
        _put_reduced(passes, share.total)
    return measured


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
    total = GradientSum(passes.parameters())
    before = ModelState(passes.state.model, passes.parameters())
    measured: list[SAMPasses] = []
    try:
        for closure, share in zip(closures, own, strict=True):
            if is_plain:
                measured.append(_plain_pass(passes, closure, reduce=False))
                total.take(share)
            else:
                if rest is not None and measured:
                    before.begin_again()  # as for the rest: all start from the same state
                in_total = Share(total, share, weight)
                measured.append(passes.sam_gradient(closure, share=in_total, keep_state=rest is None))
        metrics = _weighted_mean([one.metrics for one in measured], [share / corrected for share in own])
        loss = torch.stack([one.loss * share for one, share in zip(measured, own, strict=True)]).sum()
        if rest is None:
            _put_reduced(passes, total)
            return SAMPasses(metrics, loss)
        before.begin_again()  # the few examples of a part would make noisy statistics: the rest's count
        rest_loss = shares[-1] * _add_rest(passes, rest, shares[-1], total)
    except BaseException:
        before.restore()
        raise
    return SAMPasses(dataclasses.replace(metrics, loss=corrected * metrics.loss + rest_loss), loss + rest_loss)


def _plain_pass(passes: StepPasses, closure: Closure, *, reduce: bool) -> SAMPasses:
    loss = passes.run(closure, reduce=reduce)
    return SAMPasses(SAMMetrics(loss=loss, perturbation_norm=loss.new_zeros(())), loss)


def _put_reduced(passes: StepPasses, total: GradientSum) -> None:
    """Make a sum of gradients the parameters' gradients, averaged over workers that do not share them yet."""
    total.put()
    ddp.reduce_gradients(passes.parameters(), passes.state.model)


def _add_rest(passes: StepPasses, rest: Closure, share: float, total: GradientSum) -> Tensor:
    """Run the plain pass, leave the gradient of the whole batch, and return the rest's loss."""
    model = passes.state.model
    if ddp.has_no_sync(model) and not getattr(ddp.unwrap(model), "find_unused_parameters", False):
        total.put(1 / share)  # DDP adds the rest's gradient to it, and reduces the sum while it computes
        loss = passes.run_keeping_gradients(rest)
        with torch.no_grad():
            torch._foreach_mul_([p.grad for p in passes.parameters() if p.grad is not None], share)
        return loss
    loss = passes.run(rest, reduce=False)
    total.take(share)
    _put_reduced(passes, total)
    return loss


def _weighted_mean(metrics: Sequence[SAMMetrics], shares: Sequence[float]) -> SAMMetrics:
    """Return the mean of the metrics of several micro-batches; the shares sum to 1."""

    def mean(name: str) -> Tensor:
        values = [getattr(one, name) * share for one, share in zip(metrics, shares, strict=True)]
        return torch.stack(values).sum()

    return SAMMetrics(**{f.name: mean(f.name) for f in dataclasses.fields(SAMMetrics)})


# Two visible passes: what `with opt.perturbed():` does around the second one.


@dataclass
class PerturbedPass:
    """What ``with opt.perturbed(loss) as second:`` yields: set ``second.loss`` to have ``metrics.sharpness``."""

    loss: Tensor | None = None


@contextlib.contextmanager
def perturbed_block(passes: StepPasses, loss: Tensor | None) -> Iterator[PerturbedPass]:
    """Move to w + eps within the block; its gradients, combined with the earlier ones, allow one step."""
    state = passes.state
    _check_block(passes)
    if state.marks.used_gradients(passes.parameters()) and state.warn_once("used gradients"):
        warnings.warn(USED_WARNING, UserWarning, stacklevel=3)
    stay = not passes.needs_perturbed_pass()
    weight = passes.settings.correction_weight()
    share = None if weight == 1.0 or stay else Share(GradientSum(passes.parameters()), 1.0, weight)
    num_backwards = state.marks.num_backwards()
    # A direction that is not the gradient needs no first pass; the one at w + eps may then be the only one.
    keep_state = num_backwards > 0 or passes.settings.follows_gradient
    second = PerturbedPass()
    with passes.at_perturbed_weights(share, stay=stay, keep_state=keep_state) as norms, passes.replay.repeated():
        yield second
        if 0 < state.marks.num_backwards() < num_backwards:
            raise ValueError(LOST_MICRO_BATCHES.format(before=num_backwards, within=state.marks.num_backwards()))
    if share is not None:
        share.total.put()
    state.metrics = _block_metrics(loss, second.loss, norms)
    state.marks.allow_step(passes.parameters())


def _block_metrics(loss: Tensor | None, perturbed_loss: Tensor | None, norms: AscentNorms) -> SAMMetrics:
    """Return metrics with the losses that the user gave."""
    losses = {"loss": loss, "perturbed_loss": perturbed_loss}
    known = {name: keep_loss(value) for name, value in losses.items() if value is not None}
    if len(known) == 2:
        known["sharpness"] = known["perturbed_loss"] - known["loss"]
    return SAMMetrics(**known, grad_norm=norms.gradient, perturbation_norm=norms.perturbation)


def _check_block(passes: StepPasses) -> None:
    """Raise where ``perturbed()`` cannot be what is meant."""
    settings, state = passes.settings, passes.state
    state.check_not_perturbed("perturbed()")
    if settings.ascent_steps > 1:
        raise ValueError(
            f"perturbed() takes one ascent step, but ascent_steps={settings.ascent_steps}: the steps in between "
            "need their own gradients. Use step(closure), or ascent_steps=1."
        )
    if state.marks.unused_pass(passes.parameters()):
        raise ValueError(
            "perturbed() was entered again before step() used the gradients of the last block: they would be lost. "
            "To accumulate, run all micro-batches before the block and all of them again inside it, or pass one "
            "closure per micro-batch: opt.step([closure_1, closure_2]). To discard them, call opt.zero_grad()."
        )
    if state.marks.unscaled(passes.parameters()):
        raise ValueError(
            "scaler.unscale_(opt) was called before `with opt.perturbed():`. A GradScaler unscales once a step, so the "
            "gradients of the second pass, which the step uses, would stay scaled. Call it after the block, and clip "
            "there; the first pass needs no unscaling."
        )
    if settings.mixes_gradients and ddp.has_no_sync(state.model) and not settings.sync_perturbation:
        given = "combine" if settings.combine is not None else f"weight={settings.weight}"
        raise ValueError(
            f"perturbed() with {given} under DistributedDataParallel "
            "mixes the gradients of both passes, so both must be reduced. Pass sync_perturbation=True and run the "
            "first pass outside no_sync(), or use step(closure), which reduces once."
        )
