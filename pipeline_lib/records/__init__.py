"""What stages leave in files, as typed values: for all who read them."""
