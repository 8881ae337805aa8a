"""What the commands of `headscope prune` can be told; imports no torch."""
