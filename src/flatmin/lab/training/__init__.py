"""The training loop and what it needs, and trained models loaded back. May import runs and what runs may."""
