"""What a head does, in descriptions: log-linear models of its weights, pair functions, examples, sentences."""
