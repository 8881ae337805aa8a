"""Relevance by backward passes with rules in place of gradients."""
