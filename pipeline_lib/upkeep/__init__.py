"""Maintenance of a store: its inventory, garbage collection, and verification."""
