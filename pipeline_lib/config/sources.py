"""Where a model and its data come from: the keys of `model` and of each item of `data.train`."""

import difflib
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, field_validator, model_validator

from pipeline_lib.config.section import Positive, Section, Seed

REPOSITORY_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$"


class TinyModel(Section):
    """A real Qwen3 of about a million parameters with random weights, built here: no hub, no GPU."""

    source: Literal["tiny"] = Field(
        description="`tiny` (built here), `local` (a folder), `huggingface` or `modelscope`"
    )
    tokenizer: str | None = Field(None, description="folder with `tokenizer.json` to build around; else one is trained")
    vocab_tokens: Annotated[int, Field(ge=300, le=65536)] = Field(
        2048, description="size of the vocabulary that is trained where no tokenizer is given"
    )
    hidden_size: Annotated[int, Field(ge=1, le=65_536)] = Field(128, description="width of the residual stream")
    layers: Annotated[int, Field(ge=1, le=1_000)] = Field(4, description="decoder layers")
    heads: Annotated[int, Field(ge=1, le=1_024)] = Field(4, description="query heads; key-value heads are half as many")
    seed: Seed = Field(0, description="of the random weights")

    @model_validator(mode="after")
    def _divisible(self) -> "TinyModel":
        if self.heads % 2 or self.hidden_size % (2 * self.heads):
            raise ValueError("heads must be even, and hidden_size a multiple of twice the heads")
        return self


class LocalModel(Section):
    """A model folder on this machine, in Hugging Face format with safetensors weights."""

    source: Literal["local"] = Field(description="a folder here")
    path: str = Field(description="the folder; its content is the key, not its name")


class HubRepository(Section):
    """A repository of a hub at one revision. Mirrors go by the clients' environment variables (`HF_ENDPOINT`, ...)."""

    source: Literal["huggingface", "modelscope"] = Field(description="the hub")
    name: Annotated[str, Field(pattern=REPOSITORY_PATTERN)] = Field(description="`owner/name` on the hub")
    revision: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="commit, tag or branch; none is the main branch. What is no commit is looked up once and remembered"
        " in the store",
    )


RowFormat = Literal["auto", "alpaca", "sharegpt", "messages", "prompt_completion", "text"]
# What a row may call by another name, see `columns`.
COLUMN_NAMES = (
    "instruction", "input", "output", "history", "system", "conversations", "from", "value", "messages", "role",
    "content", "reasoning_content", "tool_calls", "tools", "prompt", "completion", "text",
)  # fmt: skip
IGNORE = "ignore"  # in `columns`: the key of that name is left out on purpose
# What data sets often call them.
_USUAL_NAMES = {
    **dict.fromkeys(("response", "answer", "reply"), "output' or 'completion"),
    **dict.fromkeys(("question", "query"), "instruction' or 'prompt"),
    **dict.fromkeys(("reasoning", "thinking", "think"), "reasoning_content"),
    **dict.fromkeys(("conversation", "dialog", "dialogue"), "conversations' or 'messages"),
}
Role = Literal["system", "user", "assistant", "tool", "function_call"]


class HubModel(HubRepository):
    """A model of a hub."""


class Weighted(Section):
    """What all data sources have."""

    weight: Annotated[FiniteFloat, Field(gt=0.0, le=10_000.0)] = Field(
        1.0, description="times that each sample is used per epoch; 0.5 uses every other one, in turns"
    )


class Rows(Weighted):
    """How the rows of a source are read."""

    format: RowFormat = Field("auto", description="`auto` decides from the first usable row of each file, and says so")
    columns: dict[str, str] = Field(
        {}, description="other names of columns and keys, `{output: answer}`; `{label: ignore}` leaves one out"
    )
    roles: dict[str, Role] = Field({}, description="other names of roles, `{bot: assistant}`")
    max_rows: Positive | None = Field(None, description="use the first rows only")

    @field_validator("columns")
    @classmethod
    def _known(cls, columns: dict[str, str]) -> dict[str, str]:
        unknown = [(ours, theirs) for ours, theirs in columns.items() if ours not in COLUMN_NAMES and theirs != IGNORE]
        if unknown:
            raise ValueError("; ".join(_unknown_column(ours, theirs) for ours, theirs in unknown))
        return columns


def _unknown_column(ours: str, theirs: str) -> str:
    if theirs in COLUMN_NAMES:
        return f"write our name first and the file's second, {{{theirs}: {ours}}}"
    close = difflib.get_close_matches(ours, COLUMN_NAMES, n=1, cutoff=0.7)
    meant = _USUAL_NAMES.get(ours) or next(iter(close), None)
    hint = f"; did you mean '{meant}'?" if meant else ""
    return f"{ours!r} is not one of {', '.join(COLUMN_NAMES)}{hint}"


class PydocData(Weighted):
    """Questions and answers made from the documentation of the running Python: no network, no foreign data."""

    source: Literal["pydoc"] = Field(description="`pydoc` (made here), `file`, `huggingface` or `modelscope`")
    max_rows: Positive = Field(6000, description="conversations to make at the most")


class FileData(Rows):
    """Conversations or texts in files on this machine."""

    source: Literal["file"] = Field(description="files here")
    path: str = Field(
        description="a json, jsonl, csv (each also with .gz) or parquet file, or a glob; content and names of the "
        "files are the key, not their place"
    )


class HubData(HubRepository, Rows):
    """A data set of a hub: which of its files, by subset and split or by name."""

    subset: str | None = Field(None, description="configuration of the data set; none is its default")
    split: str = Field("train", description="split of the data set")
    files: tuple[str, ...] = Field((), description="globs of files to take instead of `subset` and `split`")


ModelSource = Annotated[TinyModel | LocalModel | HubModel, Field(discriminator="source")]
DataSource = Annotated[PydocData | FileData | HubData, Field(discriminator="source")]
