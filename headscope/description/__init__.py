"""Descriptions of heads: log-linear models of their weights, pair functions, examples, sentences."""
