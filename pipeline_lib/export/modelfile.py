"""Ollama's Modelfile beside a GGUF file."""

import json
from pathlib import Path

from pipeline_lib.arch.generation_config import read_generation_config
from pipeline_lib.data.encode import load_tokenizer
from pipeline_lib.export.gguf_file import stop_tokens

MODELFILE = "Modelfile"
# of generation_config.json, and Ollama's names of them
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "repetition_penalty": "repeat_penalty",
}


def modelfile(merged: Path, name: str) -> str:
    """Return Ollama's Modelfile for the file `name` of the model in `merged`."""
    tokenizer = load_tokenizer(merged)
    lines = [f"FROM ./{name}"]
    for number in stop_tokens(merged):
        lines.append(f"PARAMETER stop {json.dumps(tokenizer.id_to_token(number))}")
    settings = read_generation_config(merged)
    for key, of_ollama in _SAMPLING.items():
        if settings.get(key) is not None:
            lines.append(f"PARAMETER {of_ollama} {settings[key]}")
    return "\n".join([*lines, ""])
