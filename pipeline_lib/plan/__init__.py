"""What a run will take, told before anything is spent: arithmetic only, no torch."""
