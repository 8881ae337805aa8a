"""Finished runs read back from their files."""
