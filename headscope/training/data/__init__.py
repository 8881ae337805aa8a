"""From text files to batches of ids."""
