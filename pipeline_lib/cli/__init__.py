"""The commands: the only place that reads arguments and the environment, and that exits."""
