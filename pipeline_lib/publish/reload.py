"""Opens a model folder as its users will, with transformers alone, and lets it answer a held-out prompt."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from pipeline_lib.base.errors import TrainingError
from pipeline_lib.config.schema import Evaluate
from pipeline_lib.data.chat.encoder import load_tokenizer
from pipeline_lib.data.document import prompt_length
from pipeline_lib.data.shard.blocks import BlockReader, documents_of
from pipeline_lib.publish.device import device_for
from pipeline_lib.publish.generate import answer_to

NEW_TOKENS = 16


@dataclass(frozen=True)
class Loaded:
    """What came of it: the answer to the first held-out prompt."""

    duration_s: float
    prompt_tokens: int
    answer: str


def load_and_answer(folder: Path, shard: Path) -> Loaded:
    """Load the model in `folder` and generate a few tokens. Raises TrainingError if it cannot be loaded."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    start_s = time.monotonic()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=False)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TrainingError(f"{folder}: transformers cannot load the merged model: {reason}") from error
    model.to(device_for(folder, model.dtype))
    model.train(False)
    document = next(documents_of(BlockReader(shard / "validation")[0]))
    prompt = document.tokens[: prompt_length(document) or 1].tolist()
    answer = answer_to(model, load_tokenizer(folder), prompt, Evaluate(max_new_tokens=NEW_TOKENS))
    return Loaded(time.monotonic() - start_s, len(prompt), answer)
