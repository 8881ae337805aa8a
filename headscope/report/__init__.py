"""Tables and figures drawn from the files that a run wrote."""
