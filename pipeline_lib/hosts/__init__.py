"""Training on several hosts without a scheduler: an agent on each, started by ssh or joined."""
