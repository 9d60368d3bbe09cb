"""What fails on one rank fails on all, with the same error: no rank goes on, or waits, alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipeline_lib.base import fsio
from pipeline_lib.base.errors import DiskFull, LockLost, PipelineError


class SaveFailed(PipelineError):
    """A checkpoint could not be written, for another reason than a full disk."""

    exit_code = 74


def together(group: dist.ProcessGroup | None, where: Path, act: Callable[[], Any]) -> list[Any]:
    """Call `act` on every rank of `group` (else of all): what each returned, as JSON, by rank.

    If it failed on any rank, every rank raises the error of the first: DiskFull, LockLost, or SaveFailed naming the
    file.
    """
    said = json.dumps(_attempt(where, act))
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, said, group=group)
    answers = [json.loads(text) for text in gathered]
    for rank, answer in enumerate(answers):
        if "full" in answer:
            raise DiskFull(answer["full"])
        if "lost" in answer:
            raise LockLost(answer["lost"])
        if "failed" in answer:
            raise SaveFailed(f"rank {rank}: {answer['failed']}")
    return [answer["value"] for answer in answers]


def _attempt(where: Path, act: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": act()}
    except DiskFull as error:
        return {"full": str(error)}
    except LockLost as error:
        return {"lost": str(error)}
    except PipelineError as error:
        return {"failed": str(error)}
    except OSError as error:
        if fsio.is_disk_full(error):
            return {"full": str(fsio.disk_full(where))}
        return {"failed": f"{error.filename or where}: {error.strerror or error}"}
