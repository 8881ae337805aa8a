"""Ranking of heads by a score of each."""
