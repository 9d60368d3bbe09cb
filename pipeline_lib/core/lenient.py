"""The base of the typed result files that stages wrote: what an older version did not write is not known."""

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(_finite)]
Count = int | None
Text = str | None


class Lenient(BaseModel):
    """A base model for result files: a missing value takes its default, and unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")
