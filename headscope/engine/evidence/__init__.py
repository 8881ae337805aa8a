"""How sure it is what a head does, and whether the model needs it: tests over sentences, corrected for their number."""
