"""Which ranking of heads is faithful to the model: the performance drop when heads are removed in its order."""
