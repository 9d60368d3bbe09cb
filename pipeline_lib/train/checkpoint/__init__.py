"""Sealed, strategy-free checkpoints: full parameter names in safetensors, scalars in JSON, no pickle.

Any strategy and any number of ranks can load what any other saved.
"""

from pipeline_lib.train.checkpoint.agree import SaveFailed, together
from pipeline_lib.train.checkpoint.choice import first_valid, newest_valid, retain, sealed_steps
from pipeline_lib.train.checkpoint.publish import METRICS_NAME, TENSORS, Snapshot, publish_checkpoint, step_name
from pipeline_lib.train.checkpoint.restore import (
    own_tensors,
    read_own,
    read_state,
    refuse_foreign,
    restore_random_state,
    strategy_state,
)
from pipeline_lib.train.checkpoint.saver import Saver
from pipeline_lib.train.checkpoint.tensors import load_tensors, save_tensors

__all__ = [
    "METRICS_NAME",
    "TENSORS",
    "SaveFailed",
    "Saver",
    "Snapshot",
    "first_valid",
    "load_tensors",
    "newest_valid",
    "own_tensors",
    "publish_checkpoint",
    "read_own",
    "read_state",
    "refuse_foreign",
    "restore_random_state",
    "retain",
    "save_tensors",
    "sealed_steps",
    "step_name",
    "strategy_state",
    "together",
]
