"""The export stage: the merged model in the format of other programs, and its proof.

What is written is read back from disk and has to be the merged model (export/gguf_proof.py,
export/fp8_proof.py); otherwise the stage fails, publishing nothing.
"""

import shutil
from pathlib import Path
from typing import Any

from pipeline_lib.config.exports import FP8, Q4_K_M
from pipeline_lib.core.files import read_json, require_space, write_json, write_text
from pipeline_lib.core.language import N_
from pipeline_lib.core.stage import Job
from pipeline_lib.core.units import size
from pipeline_lib.export import fp8_proof, gguf_proof
from pipeline_lib.export.card import export_card, licence_of
from pipeline_lib.export.fp8 import plan_folder
from pipeline_lib.export.gguf_file import file_name, plan_file
from pipeline_lib.export.modelfile import MODELFILE, modelfile
from pipeline_lib.export.proof import device_for, kept_if_refused
from pipeline_lib.export.quantizer import plan_source, quantize
from pipeline_lib.lineage.record import LINEAGE_NAME, parse_lineage
from pipeline_lib.model.probe import PROBE_NAME
from pipeline_lib.records.export import ExportParity
from pipeline_lib.records.merge import PARITY_NAME, read_parity
from pipeline_lib.records.record import to_json


def run(job: Job) -> dict[str, Any]:
    """Write the export, read it back and compare.

    Raises DataError naming what the format lacks, and TrainingError if what was written is not the
    merged model.
    """
    kind = str(job.spec.settings["type"])
    merged = job.inputs["merge"].folder()
    trained = job.inputs["train"].folder(PROBE_NAME)
    if kind == FP8:
        _write_folder(job, merged)
    else:
        _write_file(job, kind, merged)
    parity = _prove_or_keep(job, kind, merged, trained)
    figures: dict[str, Any] = to_json(parity)
    write_json(job.out / PARITY_NAME, figures)
    record = parse_lineage(read_json(merged / LINEAGE_NAME), LINEAGE_NAME)
    licence = licence_of(merged)
    of_merge = read_parity(merged / PARITY_NAME)
    name = "The model in FP8" if kind == FP8 else file_name(kind)
    ref = job.spec.inputs["merge"]
    card = export_card(kind, name, ref, parity, of_merge, record, licence)
    write_text(job.out / "README.md", card)
    if licence is not None:
        shutil.copyfile(merged / licence.file, job.out / licence.file)
    job.say(f"export: {_in_words(parity)}")
    return figures


def _write_folder(job: Job, merged: Path) -> None:
    folder = plan_folder(merged)
    _begin(job, FP8, folder.size_bytes)
    job.hashes.update(folder.write(job.out))


def _write_file(job: Job, kind: str, merged: Path) -> None:
    name = file_name(kind)
    is_quantized = kind == Q4_K_M
    file = plan_source(merged) if is_quantized else plan_file(merged, kind)
    path = job.out / (f"{name}.source" if is_quantized else name)
    _begin(job, kind, file.size_bytes)
    file.write(path, f"{file.config['model_type']} {job.spec.inputs['merge'].digest}")
    if is_quantized:
        job.spans.begin(N_("quantize"), file.size_bytes)
        quantize(path, job.out / name)
        path.unlink()
    write_text(job.out / MODELFILE, modelfile(merged, name))


def _begin(job: Job, kind: str, size_bytes: int) -> None:
    require_space(job.out, size_bytes, f"the export {kind}")
    job.say(f"export: writing {size(size_bytes)} of weights as {kind}")
    job.spans.begin(N_("write"), size_bytes)


def _in_words(parity: ExportParity) -> str:
    types = ", ".join(f"{count} in {kind}" for kind, count in parity.tensors.items())
    return (
        f"what was written, read back, is the merged model: its tensors ({types}) differ by no "
        f"more than their types round, and logits by {parity.relative_difference:.1e} (tolerance "
        f"{parity.tolerance:.0e}, {parity.compared_logits:,} compared)"
    )


def _prove_or_keep(job: Job, kind: str, merged: Path, trained: Path) -> ExportParity:
    """Return the figures of the proof of `job.out`.

    Raises TrainingError if it is not the merged model. It is then kept in the run's directory,
    which the error names.
    """
    refused = (
        "the refused export is in {kept}, and the merged model stays as it is. Run snakemake again: "
        f"if the same is said again, this is a bug in the export, so report it with this message, "
        f"and remove {kind} from `export` until then"
    )
    device = device_for(merged)
    with kept_if_refused(job, refused):
        if kind == FP8:
            return fp8_proof.prove(job.out, merged, trained, device, job.say, job.spans)
        path = job.out / file_name(kind)
        return gguf_proof.prove(path, kind, merged, trained, device, job.say, job.spans)
