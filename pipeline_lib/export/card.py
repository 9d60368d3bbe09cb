"""The model card: the README.md of a model folder, for hubs and for readers.

Names of files and repositories are escaped, so that nothing in them becomes markup, YAML or another
column.
"""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from pipeline_lib.config.content import LICENCE_FILES
from pipeline_lib.config.exports import FP8, Q4_K_M
from pipeline_lib.config.rope import ROPE, rope_in
from pipeline_lib.config.schema import VALIDATION_SOURCES
from pipeline_lib.config.spec_settings import ADAPTER_PART
from pipeline_lib.config.train import Train, read_train
from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.core.store import Manifest, Ref
from pipeline_lib.core.text import one_line
from pipeline_lib.core.units import count, seconds
from pipeline_lib.data.how_to_call import modes_in, warning_of
from pipeline_lib.lineage.record import (
    CODE,
    LINEAGE_NAME,
    Lineage,
    attempt_text,
    code_text,
    link_of,
    newest_first,
    origin_of,
    parse_lineage,
    parse_manifest,
    part_of_base,
    settings_in,
    sources_of,
)
from pipeline_lib.records.data import Ledger
from pipeline_lib.records.export import ExportParity
from pipeline_lib.records.merge import Parity, Unproven
from pipeline_lib.records.training import Training

HUBS = ("huggingface", "modelscope")
# The names that hubs have for licences, by words of their texts.
_LICENCES = {"Apache License Version 2.0": "apache-2.0", "MIT License": "mit"}
_OTHER = "other"
MOST_ROWS = 40  # per table; lineage.json has all of them
SHOWN = ("precision", "optimizer", "lr", "lr_schedule", "global_batch_tokens", "epochs", "seed")
# of frozen weights
_DTYPES = {"bf16": "bfloat16", "fp8": "bfloat16", "fp16": "float16", "fp32": "float32"}
_HEAD = "lm_head"
# `--weights` of `qwen3 certify` for a server of an export
_CERTIFIED_AS = {"gguf-f16": "bf16", "gguf-q8_0": "fp8", Q4_K_M: "4bit", FP8: "fp8"}
_MARKUP = str.maketrans({character: f"\\{character}" for character in "\\`*_[]|~#"})
Rows = Iterable[Sequence[str]]


@dataclass(frozen=True)
class Licence:
    """The licence of a base model: the name by which hubs know it, and its file."""

    name: str
    file: str


def model_card(
    this: Ref,
    model_type: str,
    train: Train,
    training: Training,
    parity: Parity | Unproven,
    record: Lineage,
    ledger: Ledger | None,
    beside: Sequence[str] = (),
    adapter_code: str = "",
    licence: Licence | None = None,
) -> str:
    """Return README.md's text for the model folder `this`; `ledger` is None if it is not known.

    `beside` are the beginnings of the names of tensors that were copied from the base.
    `adapter_code` is the `loading_code` of the adapters, if there are any; `licence` is that of the
    base, if its file is known.
    """
    made = {}
    for part in sorted(record.links, key=newest_first):
        made[part] = parse_manifest(record.links[part].manifest, part)
    base = base_model(record)
    attempts = [(str(attempt.number), attempt_text(attempt)) for attempt in record.attempts]
    versions = dict(made["train"].versions) if "train" in made else {}
    versions.pop(CODE, None)
    steps = count(training.steps, "steps")
    tokens = count(training.supervised_tokens, "supervised tokens")

    lines = _front_matter(base, made, model_type, train, licence)
    lines += [f"# {cell(base or model_type)}, fine-tuned", ""]
    lines.append(f"{_method(train)}, {steps}, {tokens}. {_proof(parity)}")
    lines += _stretched(made)
    lines += _untrained(beside)
    licences = "Licences are not recorded: those of the base model and of the data hold."
    if licence is not None:
        licences = f"`{licence.file}` is the base model's; the licences of the data hold too."
    lines += ["", f"{_judged(made)} {licences}", ""]
    lines += _calling(made)
    lines += _adapters(adapter_code)
    lines += _table("Base model", ("from", "sha256"), _files(made, "model"))
    lines += _table("Adapters trained on", ("from", "sha256"), _files(made, ADAPTER_PART))
    lines += _table("Trained before", ("experiment", "merge", "method", "data"), _before(record))
    of_data = ("source", "rows", "samples kept", "supervised tokens")
    lines += _table("Data", of_data, _sources(ledger))
    lines += _table("Files of the data", ("from", "sha256"), _files(made, "data"))
    lines += _table("Training", ("setting", "value"), _settings(made, train, training))
    lines += _table("Attempts at the training", ("attempt", "what became of it"), attempts)
    of_links = ("made", "by", "digest", "at", "code", "machine")
    lines += _table("Lineage", of_links, _lineage(this, made))
    lines += _table("Versions at the training", ("package", "version"), versions.items())
    lines.append(
        f"`{LINEAGE_NAME}` holds all of this for machines; `qwen3 trace` shows and checks it."
    )
    lines.append("")
    return "\n".join(lines)


def _method(train: Train) -> str:
    if train.method != "lora":
        return "Fine-tuning of all weights"
    if train.lora.base == "nf4":
        return "QLoRA (base in 4 bits: NF4) fine-tuning"
    return "LoRA fine-tuning"


def loading_code(train: Train, base: str, skipped: Sequence[str], is_stretched: bool) -> str:
    """Return Python code that loads the adapters on their `base` to give the trained model.

    The folder of the adapters is the working directory's `adapter`. `base` is a name on Hugging
    Face, or a folder. `skipped` are the linears of decoder layers that a base in 4 bits leaves as
    they are.
    """
    dtype = f"torch.{_DTYPES[train.precision]}"
    options = [f"dtype={dtype}"]
    imports = ["AutoModelForCausalLM"]
    quantization = []
    if is_stretched:
        imports.insert(0, "AutoConfig")
        options.append('config=AutoConfig.from_pretrained(".")')
    if train.lora.base == "nf4":
        imports.append("BitsAndBytesConfig")
        options.append("quantization_config=four_bits")
        quantization = [
            "four_bits = BitsAndBytesConfig(",
            "    load_in_4bit=True,",
            '    bnb_4bit_quant_type="nf4",',
            "    bnb_4bit_use_double_quant=True,",
            f"    bnb_4bit_compute_dtype={dtype},",
        ]
        if skipped:  # replaces transformers' own list, which has the head alone
            quantization.append(f"    llm_int8_skip_modules={json.dumps([*skipped, _HEAD])},")
        quantization.append(")")
    lines = [
        "import torch",
        "from peft import PeftModel",
        f"from transformers import {', '.join(imports)}",
        "",
        *quantization,
        f"base = AutoModelForCausalLM.from_pretrained({json.dumps(base)}, {', '.join(options)})",
        'model = PeftModel.from_pretrained(base, "adapter")',
    ]
    return "\n".join(lines)


def adapter_card(code: str, base: str | None = None) -> str:
    """Return the text of README.md for the folder of the adapters, which `code` loads.

    `base` is the name of the base model on its hub, if it is from one.
    """
    keys = {"library_name": "peft", "pipeline_tag": "text-generation"}
    if base is not None:
        keys |= {"base_model": base, "base_model_relation": "adapter"}
    return "\n".join(_front(keys) + _adapters(code))


def export_card(
    kind: str,
    name: str,
    merged: Ref,
    parity: ExportParity,
    of_merge: Parity | Unproven,
    record: Lineage,
    licence: Licence | None = None,
) -> str:
    """Return the text of README.md of `name`, the export `kind` of `merged`.

    `of_merge` is the proof of `merged`, `record` its lineage, and `licence` that of the base, if
    its file is known.
    """
    library = "transformers" if kind == FP8 else "gguf"
    front: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation"}
    base = base_model(record)
    if licence is not None:
        front["license"] = licence.name
    if base is not None:
        front |= {"base_model": base, "base_model_relation": "quantized"}
    unproven = []
    if isinstance(of_merge, Unproven):
        unproven = [f"- that model is not proven to be the trained one: {of_merge.unproven}"]
    made = {}
    if "tokenize" in record.links:
        made["tokenize"] = parse_manifest(record.links["tokenize"].manifest, "tokenize")
    about = _about_folder(parity) if kind == FP8 else _about_file(name, parity, made)
    lines = [*_front(front), f"# {name}", ""]
    lines += [f"The model of {merged.stage} {merged.digest} as {kind}.", ""]
    lines += ["## What was verified", ""]
    lines += ["It was read back from disk and compared with that model:", "", *about.verified]
    lines += ["", "## What was not verified", "", *unproven]
    lines += [*about.unverified, "", "## How to run it", "", "```sh", *about.commands, "```", ""]
    lines += ["A server that runs is compared with the model by:", "", "```sh"]
    lines.append(f"qwen3 certify NAME --endpoint {about.endpoint} --weights {_CERTIFIED_AS[kind]}")
    return "\n".join([*lines, "```", "", *_calling(made)])


@dataclass(frozen=True)
class _About:
    """What a card says of one format: lists of lines, and where its server answers."""

    verified: list[str]
    unverified: list[str]
    commands: list[str]
    endpoint: str


def _about_file(name: str, parity: ExportParity, made: Mapping[str, Manifest]) -> _About:
    verified = [
        f"- its tensors ({_types(parity)}) are the model's, each rounded once to its type",
        f"- the model that its keys describe gives the model's logits {_within(parity)}",
        f"- its tokenizer, as transformers reads it, gives the same {parity.compared_tokens:,} ids",
        "- its chat template is the model's",
    ]
    unverified = [
        "- llama.cpp and Ollama were not run: how they compute, and how they render the chat "
        "template, was not compared. Ollama has templates of its own, which it chooses by the "
        "file's",
        "- texts that are not in Unicode's normal form NFC: the format cannot say that the "
        "model's tokenizer normalizes them",
    ]
    commands = [
        f"llama-server -m {name} --jinja{_template_option(made)}",
        "ollama create my-model -f Modelfile && ollama run my-model",
    ]
    return _About(verified, unverified, commands, "http://localhost:8080/v1")


def _about_folder(parity: ExportParity) -> _About:
    verified = [
        f"- its tensors ({_types(parity)}) are the model's: the linears of its layers rounded once "
        "to E4M3 with a scale for each row, all others bit for bit",
        "- with the inputs of these linears rounded token by token, as a server does, it gives "
        f"the model's logits {_within(parity)}",
        "- its config.json, but for `quantization_config`, its tokenizer, chat template and stop "
        "tokens are the model's files",
    ]
    unverified = ["- vLLM and SGLang were not run: how their kernels compute was not compared"]
    return _About(verified, unverified, ["vllm serve ."], "http://localhost:8000/v1")


def _types(parity: ExportParity) -> str:
    return ", ".join(f"{count} in {each}" for each, count in parity.tensors.items())


def _within(parity: ExportParity) -> str:
    return (
        f"within {parity.relative_difference:.1e} of their size (tolerance {parity.tolerance:.0e}, "
        f"{parity.compared_logits:,} compared), and the trained model's within "
        f"{parity.trained_difference:.1e}"
    )


def _template_option(made: Mapping[str, Manifest]) -> str:
    """Return llama-server's option for the mode of most trained answers; "" for the default."""
    modes = modes_in(made["tokenize"]) if "tokenize" in made else []
    if not modes or modes[0].is_default:
        return ""
    return f" --chat-template-kwargs {shlex.quote(json.dumps(modes[0].variables))}"


def licence_of(folder: Path) -> Licence | None:
    """Return the licence by its file in `folder`; None without one."""
    for file in LICENCE_FILES:
        if (folder / file).is_file():
            text = " ".join((folder / file).read_text(errors="replace").split())
            known = (name for words, name in _LICENCES.items() if words in text)
            return Licence(next(known, _OTHER), file)
    return None


def _adapters(code: str) -> list[str]:
    """Return a section on loading the adapters alone; no lines without `code`."""
    if not code:
        return []
    text = (
        "`adapter/` holds the adapters alone, for peft. They are the trained model only on a base "
        "that is loaded like this, from the folder that contains `adapter/`:"
    )
    return ["## The adapters alone", "", text, "", "```python", code, "```", ""]


def _proof(parity: Parity | Unproven) -> str:
    """Return the sentence about the comparison with the trained model, or about its absence."""
    if isinstance(parity, Unproven):
        return f"This model is not proven to be the trained one: {parity.unproven}."
    if parity.averaged_steps:
        steps = ", ".join(map(str, parity.averaged_steps))
        return (
            f"The exported weights are the mean of those after the steps {steps}, each rounded "
            f"once, and the last ones reproduce the logits that the training left within "
            f"{parity.relative_difference:.1e} of their size (tolerance {parity.tolerance:.0e})."
        )
    return (
        "The exported weights are the trained ones, each rounded once, and these reproduce the "
        f"trained model's logits within {parity.relative_difference:.1e} of their size "
        f"(tolerance {parity.tolerance:.0e})."
    )


def _stretched(made: Mapping[str, Manifest]) -> list[str]:
    """Return a paragraph about `model.rope`; no lines if it was not set."""
    rope = rope_in(settings_in(made["train"])) if "train" in made else None
    if rope is None:
        return []
    text = (
        f"The model was trained with rotary embeddings stretched by {rope.type}, factor "
        f"{rope.factor:g}, at every length: `config.json` has the values, and the base model alone "
        "needs them too."
    )
    return ["", text]


def _untrained(beside: Sequence[str]) -> list[str]:
    """Return a paragraph about the tensors beside the text model; no lines if there are none."""
    if not beside:
        return []
    names = " and ".join(f"`{name}*`" for name in beside)
    text = (
        f"Only the text model was trained. Tensors called {names} are the base model's, bit for "
        "bit."
    )
    if "mtp." in beside:
        text += (
            " `mtp.*` is the head that guesses further tokens: a server that speculates with it "
            "stays exact, and may have fewer guesses accepted than with the base model."
        )
    return ["", text]


def cell(text: str) -> str:
    """Return `text` as a cell of a Markdown table: on one line, with all markup escaped."""
    return escape(one_line(text), quote=False).translate(_MARKUP)


def base_model(record: Lineage) -> str | None:
    """Return the hub's name of the lineage's first model; None if unknown or not from a hub."""
    while True:
        entry = record.links.get("model")
        try:
            settings = settings_in(parse_manifest(entry.manifest, LINEAGE_NAME)) if entry else {}
            if settings.get("source") in HUBS:
                return str(settings.get("name"))
            if record.base is None or record.base.lineage is None:
                return None
            record = parse_lineage(record.base.lineage, LINEAGE_NAME)
        except IntegrityError:
            return None


def _before(record: Lineage) -> Rows:
    """Yield a row for each training that the base model had in this pipeline, the last one first.

    One whose record is damaged or missing ends the rows.
    """
    while True:
        entry = record.links.get(part_of_base(record.links))
        if entry is None or record.base is None:
            return
        try:
            downloaded = parse_manifest(entry.manifest, LINEAGE_NAME)
            merged = parse_manifest(record.base.manifest, LINEAGE_NAME)
            record = parse_lineage(record.base.lineage, LINEAGE_NAME)
            made = {
                part: parse_manifest(link.manifest, part) for part, link in record.links.items()
            }
        except IntegrityError:
            return
        data = []
        for part, manifest in made.items():
            if part.startswith("data."):
                data.append(f"{origin_of(manifest)}: {', '.join(sorted(manifest.files))}")
        method = _method(read_train(settings_in(made["train"]))) if "train" in made else ""
        name = str(downloaded.counts.get("experiment", ""))
        yield (name, merged.digest, method, "; ".join(data))


def _front_matter(
    base: str | None,
    made: Mapping[str, Manifest],
    model_type: str,
    train: Train,
    licence: Licence | None,
) -> list[str]:
    """Return the YAML front matter that hubs read."""
    data = [settings_in(manifest) for part, manifest in made.items() if part.startswith("data.")]
    if "tokenize" in made:  # the last sources may be held out
        data = data[: len(data) - settings_in(made["tokenize"]).get(VALIDATION_SOURCES, 0)]
    named = [str(settings.get("name")) for settings in data if settings.get("source") in HUBS]
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if licence is not None:
        front["license"] = licence.name
        if licence.name == _OTHER:
            front |= {"license_name": "base-model", "license_link": licence.file}
    if base:
        front |= {"base_model": base, "base_model_relation": "finetune"}
    if named:
        front["datasets"] = list(dict.fromkeys(named))
    front["tags"] = [model_type, "sft"]
    if train.method == "lora":
        front["tags"].append("lora")
    return _front(front)


def _front(keys: Mapping[str, Any]) -> list[str]:
    """Return `keys` as the lines of a front matter, in their order."""
    text = yaml.safe_dump(dict(keys), sort_keys=False, allow_unicode=False)
    return ["---", text.rstrip(), "---", ""]


def _judged(made: Mapping[str, Manifest]) -> str:
    """Return the sentence on how well the model does, which is not known yet."""
    split = made.get("shard")
    if split is not None and split.counts.get("validation", {}).get("blocks") == 0:
        return (
            "Nothing was held out of the data, so nothing tells how well it does on new questions."
        )
    return (
        "How well it does on held-out answers is measured after this page is written: see the "
        "report of the experiment."
    )


def _table(title: str, columns: Sequence[str], rows: Rows) -> list[str]:
    """Return a section with a table of at most MOST_ROWS rows; no lines if there are no rows."""
    of_rows = [f"| {' | '.join(map(cell, row))} |" for row in rows]
    if not of_rows:
        return []
    lines = [f"## {title}", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += of_rows[:MOST_ROWS]
    if len(of_rows) > MOST_ROWS:
        lines += ["", f"And {len(of_rows) - MOST_ROWS:,} more, in `{LINEAGE_NAME}`."]
    lines.append("")
    return lines


def _calling(made: Mapping[str, Manifest]) -> list[str]:
    """Return a section on how to call the model in each template mode; no lines without any."""
    modes = modes_in(made["tokenize"]) if "tokenize" in made else []
    if not modes:
        return []
    lines = ["## How to call it", ""]
    for mode in modes:
        lines += [f"{mode.trained}:", "", "```python", mode.code, "```", ""]
        lines += [f"A server: `{mode.request}`", ""]
    if warning := warning_of(modes):
        lines += [warning, ""]
    return lines


def _sources(ledger: Ledger | None) -> Rows:
    if ledger is None:
        return
    for one in ledger.sources:
        name = f"{one.name}, held out" if one.held_out else one.name
        yield (name, count(one.rows), count(one.kept), count(one.supervised_tokens))


def _files(made: Mapping[str, Manifest], kind: str) -> Rows:
    """Yield the origin of each download of `kind`, followed by its files and their SHA-256."""
    for part, manifest in made.items():
        if part.partition(".")[0] == kind:
            origin, *_ = sources_of(manifest)
            yield (f"{part}: {origin}", "")
            for name, entry in sorted(manifest.files.items()):
                yield (name, entry.sha256)


def _settings(made: Mapping[str, Manifest], train: Train, training: Training) -> Rows:
    """Yield the strategy, the settings in SHOWN, and all others that differ from their defaults."""
    yield ("strategy", f"{training.strategy} on {count(training.world_size, 'ranks')}")
    for name in SHOWN:
        if name not in train.replaced_keys:
            yield (name, str(getattr(train, name)))
    for part in ("tokenize", "shard", "train"):
        settings = settings_in(made[part]) if part in made else {}
        for name, value in sorted(settings.items()):
            if part == "train" and name in SHOWN:
                continue
            section = "model" if name == ROPE else part
            yield (f"{section}.{name}", str(value))


def _lineage(this: Ref, made: Mapping[str, Manifest]) -> Rows:
    yield ("this folder", this.stage, this.digest, "", "", "")
    for part, manifest in made.items():
        link = link_of(part, manifest)
        took = f"{link.started_at}, {seconds(link.duration_s)}"
        job = f"SLURM job {link.job}" if link.job else None
        where = ", ".join(filter(None, [link.machine, job]))
        yield (part, link.stage, link.digest, took, code_text(link.versions), where)
