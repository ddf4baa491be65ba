"""Sharpness-Aware Minimization for PyTorch, and the tools to measure flat minima."""

from flatmin.core import (
    SAM,
    EffectivePerturbation,
    PassCheck,
    RhoSuggestion,
    RiseCurve,
    SAMGradient,
    SAMMetrics,
    ascent_step,
    check_pass,
    effective_perturbation,
    random_step,
    sam_gradient,
    suggest_rho,
)
from flatmin.measures import (
    Bound,
    Eigenvalues,
    HessianOperator,
    Landscape,
    Score,
    Sharpness,
    SpectralDensity,
    loss_landscape,
    m_sharpness,
    pac_bayes_bound,
    predictive_power,
    sam_update_cosine,
    spectral_density,
    top_eigenvalues,
)

# Their names before 0.2.
RealisedPerturbation, realised_perturbation = EffectivePerturbation, effective_perturbation

__version__ = "0.1.0"

__all__ = [
    "SAM",
    "Bound",
    "EffectivePerturbation",
    "Eigenvalues",
    "HessianOperator",
    "Landscape",
    "PassCheck",
    "RealisedPerturbation",
    "RhoSuggestion",
    "RiseCurve",
    "SAMGradient",
    "SAMMetrics",
    "Score",
    "Sharpness",
    "SpectralDensity",
    "ascent_step",
    "check_pass",
    "effective_perturbation",
    "loss_landscape",
    "m_sharpness",
    "pac_bayes_bound",
    "predictive_power",
    "random_step",
    "realised_perturbation",
    "sam_gradient",
    "sam_update_cosine",
    "spectral_density",
    "suggest_rho",
    "top_eigenvalues",
]
