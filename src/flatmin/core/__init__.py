"""Sharpness-Aware Minimization: the optimizer and its math. Needs only torch."""

from flatmin.core.gradient import SAMGradient, sam_gradient
from flatmin.core.norm_layers import norm_parameters
from flatmin.core.pass_check import PassCheck, check_pass
from flatmin.core.perturbation import ascent_step, random_step
from flatmin.core.rho_finder import suggest_rho
from flatmin.core.rho_suggestion import RhoSuggestion, RiseCurve
from flatmin.core.rounding import EffectivePerturbation, effective_perturbation
from flatmin.core.sam import SAM
from flatmin.core.step_state import SAMMetrics

__all__ = [
    "SAM",
    "EffectivePerturbation",
    "PassCheck",
    "RhoSuggestion",
    "RiseCurve",
    "SAMGradient",
    "SAMMetrics",
    "ascent_step",
    "check_pass",
    "effective_perturbation",
    "norm_parameters",
    "random_step",
    "sam_gradient",
    "suggest_rho",
]
