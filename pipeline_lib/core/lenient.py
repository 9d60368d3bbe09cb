"""The base of the typed result files that stages wrote: what an older version did not write is not known."""

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(_finite)]
Count = int | None
Text = str | None


class Lenient(BaseModel):
    """A base model for result files: a missing value or a null takes its default, and unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        has_other_default = {name for name, field in cls.model_fields.items() if field.default is not None}
        return {name: each for name, each in value.items() if each is not None or name not in has_other_default}
