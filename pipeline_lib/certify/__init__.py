"""The certificate: whether a running server serves the model in a folder."""
