"""What a checkpoint takes on disk."""

from pipeline_lib.config.schema import Train
from pipeline_lib.plan.activations import FP32_BYTES
from pipeline_lib.plan.geometry import Geometry

MOMENTS_BYTES = 2 * FP32_BYTES


def checkpoint_bytes(geometry: Geometry, train: Train) -> int:
    """Size of a checkpoint: fp32 weights and moments of what is trained."""
    return geometry.trained_parameters(train) * (FP32_BYTES + MOMENTS_BYTES)
