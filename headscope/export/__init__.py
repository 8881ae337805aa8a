"""Models as other programs run them: one file an engine, found by its registration."""
