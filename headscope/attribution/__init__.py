"""Captum over head gates: what each head adds to what a model says."""
