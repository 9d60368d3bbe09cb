"""What this machine takes for each part of a step."""
