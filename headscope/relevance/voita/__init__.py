"""Voita et al.'s relevance of heads, in closed form."""
