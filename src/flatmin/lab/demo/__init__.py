"""The study behind ``make demo``. May import studies and what studies may."""
