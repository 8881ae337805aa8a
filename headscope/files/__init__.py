"""Files: one rule for what may be replaced (`output_checks`), one way to do it (`folders`), readers and writers."""
