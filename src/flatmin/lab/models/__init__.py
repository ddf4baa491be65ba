"""The paper's networks, written here, and everything in timm by name."""
