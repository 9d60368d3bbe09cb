"""What becomes of a trained model: the merged folder, files for other programs, an upload."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from pipeline_lib.config.section import RepositoryName, Section


class Average(Section):
    """The mean of several checkpoints' merged weights."""

    last: Annotated[int, Field(ge=2, le=1000)] = Field(
        description="checkpoints in the mean: the last one, and those of `train.save_every_steps` "
        "before it"
    )


class Merge(Section):
    """The exported model folder."""

    dtype: Literal["auto", "bf16", "fp32"] = Field(
        "auto", description="data type of the weights; `auto` is the base model's"
    )
    base: Literal["dequantized", "original"] = Field(
        "dequantized",
        description="after `lora.base: nf4`: add the adapters to the dequantized weights of the "
        "training, or to the"
        " original ones; with `original` the result is not compared with the trained model",
    )
    average: Average | None = Field(
        None,
        description="export the mean of the merged weights of the last checkpoints, in place of "
        "the last one: `{last: 5}`; the evaluation says which is better. They have to be kept: see "
        "`train.keep_last`",
    )

    @property
    def averaged(self) -> int:
        """The number of checkpoints in the merged weights."""
        return 1 if self.average is None else self.average.last


FP8 = "fp8"
Q4_K_M = "gguf-q4_k_m"
ExportType = Literal["gguf-f16", "gguf-q8_0", "gguf-q4_k_m", "fp8"]
EXPORT_TYPES: tuple[str, ...] = get_args(ExportType)


class Push(Section):
    """The hubs to which the finished model folder is uploaded, as the last stage.

    The token is that of the hub's own client, from the environment, and never a key here.
    """

    huggingface: RepositoryName | None = Field(
        None, description="`owner/name` on Hugging Face; made private if it is not there"
    )
    modelscope: RepositoryName | None = Field(
        None, description="`owner/name` on ModelScope; made private if it is not there"
    )
