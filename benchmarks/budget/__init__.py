"""Where the time of our training step goes, kernel by kernel."""
