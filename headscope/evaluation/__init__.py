"""How good a model is: translation quality, likelihood, each head off by itself."""
