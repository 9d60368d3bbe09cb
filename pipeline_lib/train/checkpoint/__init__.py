"""Sealed, strategy-free checkpoints: full parameter names in safetensors, scalars in JSON, no pickle.

Any strategy and any number of ranks can load what any other saved.
"""

from pipeline_lib.train.checkpoint.agree import SaveFailed, together
from pipeline_lib.train.checkpoint.publish import TENSORS, Snapshot, publish_checkpoint
from pipeline_lib.train.checkpoint.restore import (
    own_tensors,
    read_own,
    read_state,
    refuse_foreign,
    restore_random_state,
    strategy_state,
)
from pipeline_lib.train.checkpoint.rows import ROWS_FOLDER, Rows, SavedRows, read_rows
from pipeline_lib.train.checkpoint.saver import Saver
from pipeline_lib.train.checkpoint.tensors import load_tensors, save_tensors

__all__ = [
    "ROWS_FOLDER",
    "TENSORS",
    "Rows",
    "SaveFailed",
    "SavedRows",
    "Saver",
    "Snapshot",
    "load_tensors",
    "own_tensors",
    "publish_checkpoint",
    "read_own",
    "read_rows",
    "read_state",
    "refuse_foreign",
    "restore_random_state",
    "save_tensors",
    "strategy_state",
    "together",
]
