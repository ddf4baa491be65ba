"""How flat is a minimum: m-sharpness, Hessian spectra, loss landscapes, the bound, predictive power."""

from flatmin.measures.hessian import (
    Eigenvalues,
    HessianOperator,
    SpectralDensity,
    spectral_density,
    top_eigenvalues,
)
from flatmin.measures.sharpness import Sharpness, m_sharpness

__all__ = [
    "Eigenvalues",
    "HessianOperator",
    "Sharpness",
    "SpectralDensity",
    "m_sharpness",
    "spectral_density",
    "top_eigenvalues",
]
