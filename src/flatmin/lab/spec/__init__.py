"""What a run is: frozen dataclasses, checked when built, named by a hash. Imports core and errors only."""
