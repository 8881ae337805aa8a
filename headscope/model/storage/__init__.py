"""Weights that a module does not hold as they are: offloaded by accelerate, or quantised."""
