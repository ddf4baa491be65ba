"""The experiments behind the paper's tables."""
