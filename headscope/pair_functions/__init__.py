"""What heads may look at: a small function for each, found by `headscope.description.pair_function`."""
