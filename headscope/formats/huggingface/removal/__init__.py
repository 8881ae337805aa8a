"""Transformers models with fewer heads, or fewer keys and values: which parts go, and the cut."""
