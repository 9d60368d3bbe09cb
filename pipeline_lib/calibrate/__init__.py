"""Calibration: measured rates and costs of this machine for the parts of a training step."""
