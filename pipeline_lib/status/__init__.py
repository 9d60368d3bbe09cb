"""What every experiment of a store is at."""
