"""Foret et al. (2021): every table and figure, at three scales. May import studies and what studies may."""
