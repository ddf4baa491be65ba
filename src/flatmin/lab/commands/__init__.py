"""The subcommands of ``flatmin``, one file each. May import everything in the lab."""
