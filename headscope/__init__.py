"""headscope: what the attention heads of a trained Transformer do, how much each one matters, which can go."""

__version__ = "0.1.0"
