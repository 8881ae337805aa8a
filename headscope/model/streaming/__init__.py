"""Attention of long texts without the matrix of weights: contexts, and statistics of its rows, in linear memory."""
