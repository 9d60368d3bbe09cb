"""What all sections of a config are, and the kinds of values that many keys share."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

Fraction = Annotated[FiniteFloat, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(ge=1)]
MOST_TOKENS = 1 << 24
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Seconds = Annotated[int, Field(ge=1, le=366 * 24 * 3600)]
Seed = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """Base of all sections: frozen, and a key that is not declared is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
