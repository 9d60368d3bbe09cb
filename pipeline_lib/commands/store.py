"""`store ls | du | gc | verify`: the upkeep of the store."""

from typing import Any


def add_to(commands: Any) -> None:
    """Add these commands to the subparsers `commands`."""
