"""Our own study: how much of SAM's gain is left at what cost. May import foret2021, rho_rule and what these may."""
