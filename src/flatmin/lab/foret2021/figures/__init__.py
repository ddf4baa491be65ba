"""The experiments behind the paper's figures and its theorem."""
