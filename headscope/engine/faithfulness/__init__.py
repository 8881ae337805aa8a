"""Faithfulness of rankings: the performance drop when heads are removed in their order."""
