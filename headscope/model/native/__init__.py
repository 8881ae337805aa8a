"""headscope's own Transformer."""
