"""Evaluation of a model: translation quality, likelihood, each head off by itself."""
