"""One line in a trainer: each module imports its trainer, so import the one you need. May import `flatmin.core`."""
