"""An action of all ranks that fails on all of them, so that no rank goes on, or waits, alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipeline_lib.core import files
from pipeline_lib.core.errors import DiskFull, LockLost, PipelineError
from pipeline_lib.train.dist import gather_texts


class SaveFailed(PipelineError):
    """A failure to write a checkpoint, for another reason than a full disk."""

    exit_code = 74


def together(group: dist.ProcessGroup | None, where: Path, act: Callable[[], Any]) -> list[Any]:
    """Call `act` on every rank of `group` (default: all); return the JSON results by rank.

    If it fails on any rank, every rank raises the error of the first one: DiskFull, LockLost, or
    SaveFailed naming the file.
    """
    own: dict[str, Any]
    try:
        own = {"value": act()}
    except DiskFull as error:
        own = {"full": str(error)}
    except LockLost as error:
        own = {"lost": str(error)}
    except PipelineError as error:
        own = {"failed": str(error)}
    except (RuntimeError, MemoryError) as error:  # of torch
        own = {"failed": f"{where}: {str(error).strip().splitlines()[-1]}"}
    except OSError as error:
        own = {"failed": f"{error.filename or where}: {error.strerror or error}"}
        if files.is_disk_full(error):
            own = {"full": str(files.disk_full(where))}
    answers = [json.loads(text) for text in gather_texts(json.dumps(own), group)]
    for rank, answer in enumerate(answers):
        if "full" in answer:
            raise DiskFull(answer["full"])
        if "lost" in answer:
            raise LockLost(answer["lost"])
        if "failed" in answer:
            raise SaveFailed(f"rank {rank}: {answer['failed']}")
    return [answer["value"] for answer in answers]
