"""The training stage: starts the ranks by one of four launchers and turns what happens to them into one message."""
