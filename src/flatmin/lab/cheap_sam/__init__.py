"""Our own study: how much of SAM's gain is left at what cost. May import studies and what studies may."""
