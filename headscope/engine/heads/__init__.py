"""What analyses see of attention: heads of one site and layer, and rows of their weights, whole or streamed."""
