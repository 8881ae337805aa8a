"""Removing heads: which can go, taking them out of the matrices, and proof that nothing else changed."""
