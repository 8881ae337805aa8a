"""Taking heads out of the weights, and the proof that nothing else changed."""
