"""Which ranking of heads deserves belief: heads removed in its order, and the harm that follows."""
