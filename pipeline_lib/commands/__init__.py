"""What people and rules type, a module for each kind: its arguments, and what it calls."""
