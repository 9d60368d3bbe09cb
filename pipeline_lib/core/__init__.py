"""Files, locks, the store and the harness that runs a stage."""
