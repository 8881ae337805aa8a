"""Which heads go by a measure of each."""
