"""Sharpness-Aware Minimization for PyTorch, and the tools to measure flat minima."""

from flatmin.core import (
    SAM,
    RealisedPerturbation,
    SAMGradient,
    SAMMetrics,
    ascent_step,
    random_step,
    realised_perturbation,
    sam_gradient,
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

__version__ = "0.1.0"

__all__ = [
    "SAM",
    "Bound",
    "Eigenvalues",
    "HessianOperator",
    "Landscape",
    "RealisedPerturbation",
    "SAMGradient",
    "SAMMetrics",
    "Score",
    "Sharpness",
    "SpectralDensity",
    "ascent_step",
    "loss_landscape",
    "m_sharpness",
    "pac_bayes_bound",
    "predictive_power",
    "random_step",
    "realised_perturbation",
    "sam_gradient",
    "sam_update_cosine",
    "spectral_density",
    "top_eigenvalues",
]
