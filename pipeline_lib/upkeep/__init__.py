"""What lies in the store, who needs it, whether it is whole, and what may go."""
