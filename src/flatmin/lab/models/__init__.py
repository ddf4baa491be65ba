"""The paper's models, and timm's by name. May import spec and data."""
