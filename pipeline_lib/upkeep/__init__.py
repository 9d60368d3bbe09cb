"""What lies in a store, what may go, and whether it is whole."""
