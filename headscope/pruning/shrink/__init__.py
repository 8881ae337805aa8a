"""The whole way from a checkpoint to a smaller one that was measured."""
