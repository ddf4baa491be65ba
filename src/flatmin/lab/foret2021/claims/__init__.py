"""What the paper says: its numbers, verbatim, and its claims in words."""
