"""What a training leaves in its directory: checkpoints, state, history, the record of the run."""
