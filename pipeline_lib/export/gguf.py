"""The export stage: the merged model as one GGUF file, for llama.cpp and Ollama, and its proof.

The file is read back from disk and has to be the merged model (export/gguf_proof.py); otherwise the
stage fails, publishing nothing.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from pipeline_lib.arch.generation_config import read_generation_config
from pipeline_lib.core.errors import TrainingError
from pipeline_lib.core.files import read_json, require_space, write_json, write_text
from pipeline_lib.core.language import N_
from pipeline_lib.core.stage import Job
from pipeline_lib.core.units import size
from pipeline_lib.data.encode import load_tokenizer
from pipeline_lib.export.card import export_card, licence_of
from pipeline_lib.export.gguf_file import file_name, plan_file, stop_tokens
from pipeline_lib.export.gguf_proof import prove
from pipeline_lib.export.proof import REFUSED, device_for
from pipeline_lib.lineage.record import LINEAGE_NAME, parse_lineage
from pipeline_lib.model.probe import PROBE_NAME
from pipeline_lib.records.export import ExportParity
from pipeline_lib.records.merge import PARITY_NAME, read_parity
from pipeline_lib.records.record import to_json

MODELFILE = "Modelfile"  # of Ollama
# of generation_config.json, and Ollama's names of them
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "repetition_penalty": "repeat_penalty",
}


def run(job: Job) -> dict[str, Any]:
    """Write the file, read it back and compare.

    Raises DataError naming what GGUF has no names for, and TrainingError if the file is not the
    merged model.
    """
    kind = str(job.spec.settings["type"])
    merged = job.inputs["merge"].folder()
    trained = job.inputs["train"].folder(PROBE_NAME)
    name = file_name(kind)
    file = plan_file(merged, kind)
    require_space(job.out, file.size_bytes, f"the file of {kind}")
    job.say(f"export: writing {size(file.size_bytes)} of weights as {kind}")
    job.spans.begin(N_("write"), file.size_bytes)
    file.write(job.out / name, f"{file.config['model_type']} {job.spec.inputs['merge'].digest}")
    parity = _prove_or_keep(job, job.out / name, kind, merged, trained)
    figures: dict[str, Any] = to_json(parity)
    write_json(job.out / PARITY_NAME, figures)
    write_text(job.out / MODELFILE, modelfile(merged, name))
    record = parse_lineage(read_json(merged / LINEAGE_NAME), LINEAGE_NAME)
    licence = licence_of(merged)
    of_merge = read_parity(merged / PARITY_NAME)
    ref = job.spec.inputs["merge"]
    card = export_card(kind, name, ref, parity, of_merge, record, licence)
    write_text(job.out / "README.md", card)
    if licence is not None:
        shutil.copyfile(merged / licence.file, job.out / licence.file)
    job.say(f"export: {_in_words(parity)}")
    return figures


def _in_words(parity: ExportParity) -> str:
    types = ", ".join(f"{count} in {kind}" for kind, count in parity.tensors.items())
    return (
        f"the file, read back, is the merged model: its tensors ({types}) differ by no more than "
        f"their types round, and logits by {parity.relative_difference:.1e} (tolerance "
        f"{parity.tolerance:.0e}, {parity.compared_logits:,} compared)"
    )


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


def _prove_or_keep(job: Job, path: Path, kind: str, merged: Path, trained: Path) -> ExportParity:
    """Return the figures of the proof of the file at `path`.

    Raises TrainingError if it is not the merged model. It is then kept in the run's directory,
    which the error names.
    """
    kept = job.run_dir / REFUSED
    shutil.rmtree(kept, ignore_errors=True)  # of an earlier attempt
    try:
        return prove(path, kind, merged, trained, device_for(merged), job.say, job.spans)
    except TrainingError as error:
        shutil.move(job.out, kept)
        raise TrainingError(
            f"{error}. Nothing was published; the refused file is in {kept}, and the merged model "
            "stays as it is. Run snakemake again: if the same is said again, this is a bug in the "
            f"export, so report it with this message, and remove {kind} from `export` until then"
        ) from error
