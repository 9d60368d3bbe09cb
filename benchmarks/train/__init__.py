"""The training step against what users run: the same model, documents and batches, in a run."""
