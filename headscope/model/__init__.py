"""The attention function every head goes through, and how models of other libraries reach it."""
