"""The panels of pruning figures, one kind a file."""
