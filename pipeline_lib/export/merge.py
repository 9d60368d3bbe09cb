"""The merge stage: merge base and trained weights into a folder, and check it by the model.

It is a Hugging Face folder with the same weight files and tensors as the base. It is read back from
disk and has to be the trained model (export/proof.py); otherwise the stage fails, publishing
nothing.
"""

import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline_lib.arch.config_json import read_object, without_quantization
from pipeline_lib.arch.generation_config import generation_config_of
from pipeline_lib.arch.rope import stretched
from pipeline_lib.arch.weight_files import SINGLE_NAME
from pipeline_lib.config.compile import run_digest
from pipeline_lib.config.content import (
    ADAPTER_FOLDER,
    GENERATION_NAME,
    LICENCE_FILES,
    MEDIA_FILES,
    tokenizer_files,
)
from pipeline_lib.config.exports import Merge
from pipeline_lib.config.rope import Rope, rope_in
from pipeline_lib.config.section import read_settings
from pipeline_lib.config.spec_settings import SAVE_EVERY_STEPS
from pipeline_lib.config.train import Train, read_train
from pipeline_lib.core.errors import DataError, TrainingError
from pipeline_lib.core.files import read_json, require_space, write_json, write_text
from pipeline_lib.core.language import N_
from pipeline_lib.core.run_folder import CHECKPOINTS, METRICS_NAME, SUMMARY_NAME, sealed_steps
from pipeline_lib.core.stage import Job
from pipeline_lib.core.store import Ref, Spec, describe_file, verify
from pipeline_lib.core.units import count, size
from pipeline_lib.data.chat_template import (
    TOKENIZER_CONFIG_NAME,
    has_template,
    read_tokenizer_config,
)
from pipeline_lib.data.pool import Limits
from pipeline_lib.data.template_worker import end_of_turn
from pipeline_lib.export.adapter import adapter_code, export_adapter
from pipeline_lib.export.card import HUBS, adapter_card, licence_of, model_card
from pipeline_lib.export.fold import Fold, mean_of, plan_fold
from pipeline_lib.export.proof import device_for, kept_if_refused, prove
from pipeline_lib.export.write import Buffers, Entry, finite, write_files, write_index
from pipeline_lib.lineage.record import LINEAGE_NAME, lineage_of, parse_manifest
from pipeline_lib.model.build import DTYPES
from pipeline_lib.model.weights import find_tensors
from pipeline_lib.records.data import LEDGER_NAME, Ledger
from pipeline_lib.records.merge import PARITY_NAME, Parity, Unproven
from pipeline_lib.records.record import read_record, to_json
from pipeline_lib.records.training import read_training

UNPROVEN = (
    "its adapters were trained on a base in 4 bits and added to the unquantized one (merge.base: "
    "original), so it is "
    "another model than the trained one, and its logits were not compared with that one's"
)
# refer to the base's own code, which is not exported
CODE_KEYS = frozenset({"auto_map", "custom_pipelines"})


def run(job: Job) -> dict[str, Any]:
    """Merge, export, read back and compare.

    Raises TrainingError if the exported model differs from the trained one. A model with the
    unquantized base in place of the trained one's is not compared.
    """
    base = job.inputs["model"].folder()
    trained = job.inputs["train"].folder()
    generation = generation_config_of(job.inputs)
    values = {key: value for key, value in job.spec.settings.items() if key != SAVE_EVERY_STEPS}
    merge = read_settings(Merge, values)
    settings = job.inputs["train"].manifest.spec["settings"]
    train = read_train(settings)
    rope = rope_in(settings)
    is_proven = merge.base == "dequantized"
    as_merged = train if is_proven else unquantized(train)
    averaged = NOT_AVERAGED
    if merge.average is not None:
        averaged = checkpoints_before(job, merge.average.last)
    fold = plan_fold(base, trained, as_merged)
    fold = mean_of(fold, [plan_fold(base, one, as_merged) for one in averaged.checkpoints])
    dtype = None if merge.dtype == "auto" else DTYPES[merge.dtype]
    job.say(f"merge: writing {size(fold.size_bytes(dtype))} of weights")
    job.spans.begin(N_("write"), fold.size_bytes(dtype))
    job.hashes.update(export(fold, base, generation, job.out, dtype, rope))
    loading = ""
    if train.method == "lora" and not averaged.steps:  # a mean of products is no adapter
        spec = job.inputs["model"].manifest.spec
        model = spec["settings"]
        base_folder = spec["where"].get("path")
        loading = adapter_code(base, model, train, rope)
        job.hashes.update(export_adapter(fold.trained.adapters, train, model, job.out, base_folder))
        hub_name = str(model["name"]) if model.get("source") in HUBS else None
        write_text(job.out / ADAPTER_FOLDER / "README.md", adapter_card(loading, hub_name))
    keys = read_object(base / "config.json").keys() | read_tokenizer_config(base).keys()
    code = ", ".join(sorted(CODE_KEYS & keys))
    if code:
        text = f"the base model's own code ({code}) is no part of the merged one"
        job.say(f"merge: {text}; transformers' is used")
    parity: Parity | Unproven = Unproven(unproven=UNPROVEN)
    if is_proven:
        parity = prove_or_keep(job, base, trained, train, averaged)
    figures: dict[str, Any] = to_json(parity)
    write_json(job.out / PARITY_NAME, figures)
    write_origin(job, train, parity, fold.beside, loading)
    job.say(f"merge: {_in_words(parity)}")
    return figures


def _in_words(parity: Parity | Unproven) -> str:
    if isinstance(parity, Unproven):
        return parity.unproven
    return (
        f"exported tensors differ by {parity.value_difference:.1e} of their size from "
        f"the trained weights, beside rounding (tolerance {parity.value_tolerance:.0e}), and "
        f"logits by {parity.relative_difference:.1e} from the trained model's (tolerance "
        f"{parity.tolerance:.0e}, {parity.compared_logits:,} compared); rounding the weights "
        f"changes logits by {parity.rounding_difference:.1e}"
    )


@dataclass(frozen=True)
class Averaged:
    """The checkpoints before the last one in a mean, and the steps of all; none without a mean."""

    checkpoints: tuple[Path, ...] = ()
    steps: tuple[int, ...] = ()


NOT_AVERAGED = Averaged()


def checkpoints_before(job: Job, last: int) -> Averaged:
    """Return the verified checkpoints of the run with which its result makes a mean of `last`.

    They are those of the last multiples of the interval between saves. Raises DataError naming
    those that are not there, and IntegrityError if one is damaged.
    """
    sealed = job.inputs["train"]
    every = int(job.spec.settings[SAVE_EVERY_STEPS])
    end = read_training(sealed.folder(SUMMARY_NAME, METRICS_NAME)).steps
    newest = (end - 1) // every * every
    steps = [newest - every * number for number in reversed(range(last - 1))]
    if steps[0] < 1:
        raise DataError(
            f"merge.average: the run has {count(end, 'steps')}, too few for {last} checkpoints that "
            f"are {every} apart; lower merge.average.last or train.save_every_steps"
        )
    folder = job.store.run_dir(run_digest(Spec.from_json(sealed.manifest.spec, "train")))
    kept = dict(sealed_steps(folder / CHECKPOINTS))
    missing = [step for step in steps if step not in kept]
    if missing:
        raise DataError(
            f"merge.average: the mean of {last} checkpoints has those after the steps "
            f"{', '.join(map(str, steps))} and {end} in it, and {folder / CHECKPOINTS} has none "
            f"after {', '.join(map(str, missing))}; lower merge.average.last, or train again with "
            "a larger train.keep_last (another train.replica makes it another run)"
        )
    for step in steps:
        verify(kept[step])
    return Averaged(tuple(kept[step] for step in steps), (*steps, end))


def unquantized(train: Train) -> Train:
    """Return `train` with the base as it is stored."""
    return train.model_copy(update={"lora": train.lora.model_copy(update={"base": "unquantized"})})


def export(
    fold: Fold,
    base: Path,
    generation: Mapping[str, Any],
    out: Path,
    dtype: torch.dtype | None,
    rope: Rope | None = None,
) -> dict[str, str]:
    """Write a Hugging Face folder with the base's layout, without references to its code.

    Return the SHA-256 of each file of weights, by name.

    Weights are in `dtype`; if it is None, each has its dtype in the base. `generation` is the
    base's generation_config.json, and `rope` enters config.json. Raises TrainingError naming a
    weight that is not finite, or the weights that were not written as planned.
    """
    recipes = list(fold.recipes.values())
    recipes.sort(key=lambda recipe: (recipe.trained or "", recipe.stored.name))
    files: dict[str, list[Entry]] = defaultdict(list)
    for recipe in recipes:
        files[recipe.stored.path.name].append(recipe.entry(dtype))
    size_bytes = fold.size_bytes(dtype)
    require_space(out, size_bytes, "the merged model")

    def value_of(entry: Entry, buffers: Buffers) -> Tensor:
        return finite(fold.value(entry.name, entry.dtype, buffers), entry)

    # an interpreter starts for the template, which takes seconds
    with ThreadPoolExecutor(1, "template") as beside:
        stopping = beside.submit(stop_at_end_of_turn, generation, base)
        hashes = write_files(out, files, value_of)
    if SINGLE_NAME not in files:
        write_index(out, files, size_bytes)
    _refuse_other_content(out, {entry.name: entry for entry in chain(*files.values())})
    write_json(out / "config.json", _exported_config(base, rope, dtype))
    _copy_tokenizer(base, out)
    generation_config = stopping.result()
    if generation_config:
        write_json(out / GENERATION_NAME, generation_config)
    return hashes


def _exported_config(base: Path, rope: Rope | None, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the config.json of the exported model."""
    stored = without_quantization(stretched(read_object(base / "config.json"), rope))
    config = {key: value for key, value in stored.items() if key not in CODE_KEYS}
    if "text_config" not in config:
        config["use_cache"] = True
    return config if dtype is None else _with_dtype(config, dtype)


def _copy_tokenizer(base: Path, out: Path) -> None:
    """Copy the tokenizer's files, those of pictures and sounds, and the licence, without code."""
    for name in (*tokenizer_files(base), *MEDIA_FILES, *LICENCE_FILES):
        if name != GENERATION_NAME and (base / name).exists():
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(base / name, out / name)
    tokenizer = read_tokenizer_config(out)
    if tokenizer.keys() & CODE_KEYS:  # else the file stays unchanged
        plain = {key: value for key, value in tokenizer.items() if key not in CODE_KEYS}
        write_json(out / TOKENIZER_CONFIG_NAME, plain)


def _with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the config.json `config` with `dtype`, also in the text model's part.

    transformers loads by that part.
    """
    named = {key: value for key, value in config.items() if key != "torch_dtype"}
    named["dtype"] = str(dtype).removeprefix("torch.")
    if isinstance(config.get("text_config"), dict):
        named["text_config"] = _with_dtype(config["text_config"], dtype)
    return named


def _refuse_other_content(out: Path, entries: Mapping[str, Entry]) -> None:
    """Raise TrainingError unless `out` holds exactly `entries`, by name, shape and dtype."""
    written = {name: (stored.shape, stored.dtype) for name, stored in find_tensors(out).items()}
    wanted = {name: (entry.shape, entry.dtype) for name, entry in entries.items()}
    if written != wanted:
        every = sorted(written.keys() | wanted.keys())
        wrong = [name for name in every if written.get(name) != wanted.get(name)]
        text = f"{out}: was not written as planned: {', '.join(wrong[:5])}"
        raise TrainingError(f"{text}; run snakemake again")


def stop_at_end_of_turn(
    config: Mapping[str, Any], folder: Path, limits: Limits | None = None
) -> dict[str, Any]:
    """Return the generation `config` with the template's end-of-turn token as a stop token.

    Base models name another token, so that the tuned model would not stop after its answer. The
    config is unchanged without a chat template in `folder`, or if the template ends no answer
    within its `limits`: then the model was trained on raw text.
    """
    end = end_of_turn(folder, limits) if has_template(folder) else None
    if end is None:
        return dict(config)
    stops = config.get("eos_token_id")
    if not isinstance(stops, list):
        stops = [] if stops is None else [stops]
    return dict(config) if end in stops else {**config, "eos_token_id": [end, *stops]}


def prove_or_keep(
    job: Job, base: Path, trained: Path, train: Train, averaged: Averaged = NOT_AVERAGED
) -> Parity:
    """Return the figures of the proof of `job.out`.

    Raises TrainingError if it is not the trained model. It is then kept in the run's directory,
    which the error names.
    """
    refused = (
        "the refused model is in {kept}, and the training stays as it is. Run snakemake again: if "
        "the same is said again, this is a bug in the merge, so report it with this message. The "
        "refused model loads like any other, but do not rely on it"
    )
    with kept_if_refused(job, refused):
        parity = prove(
            job.out,
            base,
            trained,
            train,
            device_for(base),
            job.say,
            job.spans,
            averaged.checkpoints,
        )
    return replace(parity, averaged_steps=averaged.steps)


def write_origin(
    job: Job,
    train: Train,
    parity: Parity | Unproven,
    beside: Sequence[str] = (),
    loading: str = "",
) -> None:
    """Write lineage.json and README.md: what the model was made from and how it was checked.

    `beside` are the beginnings of the names of tensors that were copied from the base; `loading` is
    the code that loads the adapters, if there are any.

    The data's token ledger is left out if it is missing from the store or has been changed.
    """
    record = lineage_of(job.inputs, job.store, job.say)
    write_json(job.out / LINEAGE_NAME, record.model_dump(mode="json"))
    training = read_training(job.inputs["train"].folder(SUMMARY_NAME, METRICS_NAME))
    model_type = str(read_json(job.out / "config.json")["model_type"])
    ledger = None
    if "tokenize" in record.links:
        manifest = parse_manifest(record.links["tokenize"].manifest, "tokenize")
        path = job.store.sealed(Ref(manifest.stage, manifest.digest)) / LEDGER_NAME
        if path.is_file() and describe_file(path) == manifest.files.get(LEDGER_NAME):
            ledger = read_record(Ledger, path)
    card = model_card(
        job.spec.ref,
        model_type,
        train,
        training,
        parity,
        record,
        ledger,
        beside,
        loading,
        licence_of(job.out),
    )
    write_text(job.out / "README.md", card)
