"""The subcommands of ``flatmin``. May import everything in the lab."""
