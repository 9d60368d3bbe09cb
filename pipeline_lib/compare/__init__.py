"""Several experiments side by side."""
