"""Pair functions: a small function for each thing that heads may look at."""
