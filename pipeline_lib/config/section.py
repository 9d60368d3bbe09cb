"""What all sections of a config are, and the kinds of values that many keys share."""

import json
import os.path
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from pydantic.fields import FieldInfo

from pipeline_lib.core.errors import IntegrityError

Fraction = Annotated[FiniteFloat, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(ge=1)]
MOST_TOKENS = 1 << 24
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Seconds = Annotated[int, Field(ge=1, le=366 * 24 * 3600)]
Seed = Annotated[int, Field(ge=0)]
REPOSITORY_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$"
RepositoryName = Annotated[str, Field(pattern=REPOSITORY_PATTERN)]
LocalPath = Annotated[str, AfterValidator(os.path.expanduser)]  # `~` is the user's home folder


class Section(BaseModel):
    """Base of all sections: frozen, and a key that is not declared is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


AnySection = TypeVar("AnySection", bound=Section)


def fields_of(section: type[Section], above: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key of `section`, `train.lora.rank`, with its field, also in its subsections.

    Keys that hold one of several kinds of section, such as `model`, are not entered.
    """
    for name, field in section.model_fields.items():
        yield above + str(field.validation_alias or name), field
        sections = []
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                sections.append(kind)
        if len(sections) == 1:
            yield from fields_of(sections[0], f"{above}{name}.")


def flat(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting by dotted key as in a YAML `sweep` (`train.lr`); a list is one value."""
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def settings_of(section: Section, exclude: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The keys of `section` that differ from their defaults: what a spec holds and hashes."""
    return section.model_dump(mode="json", exclude_defaults=True, exclude=set(exclude))


def read_settings(section: type[AnySection], settings: Mapping[str, Any]) -> AnySection:
    """The section that `settings_of` wrote, its defaults filled in. Raises IntegrityError."""
    try:
        return section.model_validate_json(json.dumps(dict(settings)))
    except ValidationError as error:
        reason = str(error).splitlines()[0]
        message = (
            f"a spec holds settings that this code does not know ({reason}); run snakemake again"
        )
        raise IntegrityError(message) from error
