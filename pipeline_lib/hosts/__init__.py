"""Training on several hosts without a scheduler: an agent on each host, reached by ssh or joined by itself."""
