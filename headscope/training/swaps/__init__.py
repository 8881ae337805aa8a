"""Swapping heads between layers (MHR)."""
