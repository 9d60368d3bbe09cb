"""The base of typed result files from stages: what an older version did not write is unknown."""

import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from pipeline_lib.core.errors import IntegrityError


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(_finite)]
Count = int | None
Text = str | None


class Lenient(BaseModel):
    """A base model for result files: missing values take defaults, unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


def unusable(path: Path, error: ValueError) -> IntegrityError:
    """Return the error for a result file that is damaged or fails the schema (ValidationError)."""
    remedy = f"delete {path.parent} and run snakemake again"
    if not isinstance(error, ValidationError):
        return IntegrityError(f"{path} is damaged: {error}; {remedy}")
    detail = error.errors()[0]
    where = ".".join(str(key) for key in detail["loc"])
    return IntegrityError(
        f"{path}: {where}: {detail['msg']}; another version of the code sealed it: {remedy}"
    )
