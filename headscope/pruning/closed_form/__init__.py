"""Removal of heads without training: which go, and what makes up for them, in closed form."""
