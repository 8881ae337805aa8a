"""Evidence for labels and importances: tests over sentences, corrected for their number."""
