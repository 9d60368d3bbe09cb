"""`compare`: several experiments side by side."""

from typing import Any


def add_to(commands: Any) -> None:
    """Add these commands to the subparsers `commands`."""
