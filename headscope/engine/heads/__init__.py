"""The view of attention for analyses: heads of one site and layer, rows of their weights, whole or streamed."""
