"""Several experiments side by side: what differs, and whether it is more than chance."""
