"""Checkpoints of fairseq and of the MHR fork."""
