"""Running analyses: what an analysis is, the passes over a corpus, and the files of a run."""
