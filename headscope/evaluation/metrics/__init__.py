"""The metrics by which models are compared, one file each."""
