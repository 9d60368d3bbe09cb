"""`publish` and `record`: what a finished experiment leaves for DVC."""

from typing import Any


def add_to(commands: Any) -> None:
    """Add these commands to the subparsers `commands`."""
