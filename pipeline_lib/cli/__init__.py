"""The command line: the only code that reads arguments and the environment, and that exits."""
