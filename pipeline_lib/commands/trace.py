"""`trace`: where a model folder comes from."""

from typing import Any


def add_to(commands: Any) -> None:
    """Add these commands to the subparsers `commands`."""
