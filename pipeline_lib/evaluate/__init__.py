"""How good a model is on what was held out."""
