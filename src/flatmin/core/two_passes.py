"""The two-pass form: what ``with opt.perturbed():`` does around the second pass of the user's."""

import contextlib
import warnings
from collections.abc import Iterator

from torch import Tensor

from flatmin.core import ddp
from flatmin.core.gradients import GradientSum
from flatmin.core.step_passes import Share, StepPasses
from flatmin.core.step_state import PerturbedPass, SAMMetrics, two_pass_metrics

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


@contextlib.contextmanager
def perturbed_block(passes: StepPasses, loss: Tensor | None) -> Iterator[PerturbedPass]:
    """Move to w + eps within the block; its gradients, combined with the earlier ones, allow one step."""
    state = passes.state
    _check(passes)
    if state.marks.used_gradients(passes.parameters()) and state.warn_once("used gradients"):
        warnings.warn(USED_WARNING, UserWarning, stacklevel=3)
    stay = not passes.needs_perturbed_pass()
    weight = passes.settings.correction_weight()
    share = None if weight == 1.0 or stay else Share(GradientSum(list(passes.parameters())), 1.0, weight)
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
    known = SAMMetrics(grad_norm=norms.gradient, perturbation_norm=norms.perturbation)
    state.metrics = two_pass_metrics(loss, second.loss, known)
    state.marks.allow_step(passes.parameters())


def _check(passes: StepPasses) -> None:
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
    local = ddp.is_parallel() and hasattr(ddp.unwrap(state.model), "no_sync") and not settings.sync_perturbation
    if local and settings.mixes_gradients:
        given = "combine" if settings.combine is not None else f"weight={settings.weight}"
        raise ValueError(
            f"perturbed() with {given} under DistributedDataParallel "
            "mixes the gradients of both passes, so both must be reduced. Pass sync_perturbation=True and run the "
            "first pass outside no_sync(), or use step(closure), which reduces once."
        )
