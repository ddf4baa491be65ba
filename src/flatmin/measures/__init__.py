"""How flat is a minimum: m-sharpness, Hessian spectra, loss landscapes, the bound, predictive power."""
