"""Options of the commands of `headscope prune`. Imports no torch."""
