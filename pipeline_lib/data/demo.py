"""The demo's model and data: a tiny Qwen3 with its own tokenizer, and the running Python's documentation."""

import hashlib
import importlib
import inspect
import json
import math
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from pipeline_lib.config.schema import TinyModel
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import require_space, write_json, write_text
from pipeline_lib.core.stage import Say
from pipeline_lib.data.bpe import SPLIT_PATTERN
from pipeline_lib.data.chat_template import TEMPLATE_NAME, TOKENIZER_CONFIG_NAME, read_tokenizer_config, special_tokens
from pipeline_lib.data.conversations import Message
from pipeline_lib.data.documents import bits, key_of
from pipeline_lib.data.encode import TOKENIZER_NAME, load_tokenizer

# Reads the documentation of the public objects of the running Python's standard library.
# It is equal in every run of the same Python: no memory addresses, no installation paths, no hash-dependent order.

# Modules that import fast and without side effects on every system and in every build of Python.
# fmt: off
MODULES = (
    "abc", "argparse", "array", "ast", "asyncio", "base64", "bdb", "bisect", "calendar", "cmath", "cmd", "code",
    "codecs", "collections", "collections.abc", "colorsys", "concurrent.futures", "configparser", "contextlib", "copy",
    "csv", "dataclasses", "datetime", "decimal", "difflib", "dis", "email.message", "enum", "filecmp", "fileinput",
    "fnmatch", "fractions", "ftplib", "functools", "getopt", "gettext", "glob", "graphlib", "gzip", "hashlib", "heapq",
    "hmac", "html", "html.parser", "http.client", "http.cookies", "inspect", "io", "ipaddress", "itertools", "json",
    "keyword", "linecache", "locale", "logging", "logging.handlers", "mailbox", "math", "mimetypes", "numbers",
    "operator", "optparse", "os", "os.path", "pathlib", "pickle", "pkgutil", "platform", "plistlib", "pprint", "queue",
    "random", "re", "reprlib", "sched", "secrets", "selectors", "shelve", "shlex", "shutil", "signal", "smtplib",
    "socket", "socketserver", "stat", "statistics", "string", "struct", "subprocess", "tarfile", "tempfile", "textwrap",
    "threading", "time", "timeit", "token", "tokenize", "traceback", "types", "typing", "unittest", "unittest.mock",
    "urllib.parse", "urllib.request", "uuid", "warnings", "wave", "weakref", "xml.dom.minidom", "xml.etree.ElementTree",
    "zipfile", "zlib",
)
# fmt: on

MAX_SIGNATURE_CHARS = 90
MAX_SUMMARY_CHARS = 140
MIN_SUMMARY_CHARS = 12
MAX_MEMBERS = 4


@dataclass(frozen=True)
class DocumentedObject:
    """A public object of the standard library with its documentation."""

    name: str  # qualified name, such as json.dumps
    short: str  # last part of the name
    module: str
    kind: str  # module, class, function or method
    holder: str  # the module or class that it belongs to
    signature: str | None
    parameters: tuple[str, ...] | None
    summary: str | None
    members: tuple[str, ...]


def read_entries() -> Iterator[DocumentedObject]:
    """Yield all public objects of `MODULES`: the modules, their functions and classes, and the methods of classes."""
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        names = _public_names(module)
        public = [n for n in names if inspect.isclass(getattr(module, n)) or inspect.isroutine(getattr(module, n))]
        yield _entry(module_name, module, module_name, "", "module", public)
        for name in public:
            value, full_name = getattr(module, name), f"{module_name}.{name}"
            if inspect.isclass(value):
                methods = [key for key in sorted(vars(value)) if not key.startswith("_") and callable(vars(value)[key])]
                yield _entry(full_name, value, module_name, module_name, "class", methods)
                for method in methods:
                    yield _entry(f"{full_name}.{method}", vars(value)[method], module_name, full_name, "method", [])
            else:
                yield _entry(full_name, value, module_name, module_name, "function", [])


def _entry(name: str, value: Any, module: str, holder: str, kind: str, members: list[str]) -> DocumentedObject:
    signature, parameters = _signature(value) if kind in ("function", "method") else (None, None)
    short = name.rpartition(".")[2]
    listed = tuple(members[:MAX_MEMBERS])
    return DocumentedObject(name, short, module, kind, holder, signature, parameters, _summary(value, short), listed)


def _public_names(module: ModuleType) -> list[str]:
    """Return the public names of `module`: its `__all__`, else the public names defined in it."""
    if hasattr(module, "__all__"):
        return sorted(name for name in module.__all__ if name[0] != "_" and hasattr(module, name))
    own = vars(module).items()
    return sorted(name for name, value in own if name[0] != "_" and getattr(value, "__module__", "") == module.__name__)


def _signature(value: Any) -> tuple[str | None, tuple[str, ...] | None]:
    """Return the signature without annotations, and the parameter names; None if it is unknown or unsuitable."""
    try:
        signature = inspect.signature(value)
    except (ValueError, TypeError):
        return None, None
    empty = inspect.Parameter.empty
    bare = [parameter.replace(annotation=empty) for parameter in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    if len(text) > MAX_SIGNATURE_CHARS or re.search("[<{]", text):  # an address, or a set without a fixed order
        return None, None
    if sys.prefix in text or sys.base_prefix in text:  # the installation path in a default value
        return None, None
    return text, tuple(name for name in signature.parameters if name not in ("self", "cls"))


def _summary(value: Any, short: str) -> str | None:
    """Return the first sentence of the object's own docstring; None if there is none or it is unsuitable."""
    text = value.__doc__
    if not isinstance(text, str):
        return None
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", inspect.cleandoc(text)) if part.strip()]
    if paragraphs and paragraphs[0].startswith(f"{short}("):  # builtins begin with their signature
        paragraphs = paragraphs[1:]
    if not paragraphs:
        return None
    sentence = re.split(r"(?<=[.!?:])\s", paragraphs[0])[0].rstrip(":.") + "."
    fits = MIN_SUMMARY_CHARS <= len(sentence) <= MAX_SUMMARY_CHARS
    return sentence if fits and sentence.isascii() and " at 0x" not in sentence else None


# Generates questions and answers about the standard library from that documentation.
# The answers are short and follow from the question, so that a very small model visibly learns. The rows are
# byte-identical in every run of the same Python.

SYSTEM = "You know the standard library of Python. Answer briefly."
MAX_PARAMETERS = 4  # the most parameters of an object whose parameters are asked for


def write_rows(path: Path, max_rows: int) -> int:
    """Write at most `max_rows` conversations to `path`, one a line; return their number. Raises DataError if none."""
    rows = (json.dumps({"messages": messages}, ensure_ascii=False) for messages in conversations())
    chosen = list(islice(dict.fromkeys(rows), max_rows))
    if not chosen:
        raise DataError("this Python has no documentation (started with -OO?); run it without")
    write_text(path, "".join(row + "\n" for row in chosen))
    return len(chosen)


def conversations() -> Iterator[list[Message]]:
    """Yield all conversations, in an order that depends only on the version of Python.

    Objects come in pseudo-random order, each with all its questions. So the first thousand conversations cover every
    module, and held-out conversations can be answered from others about the same object.
    """
    entries = sorted(read_entries(), key=lambda entry: _hash_of(entry.name))
    holders = Counter(entry.short for entry in entries if entry.kind in ("class", "function"))
    for entry in entries:
        asked = list(_questions(entry, unique=holders[entry.short] == 1))
        first = _hash_of(entry.name)[1] % len(asked)
        for number, pair in enumerate(asked):
            if number == first:
                yield _conversation(asked[first : first + 2])  # two questions about the same object
            elif number != first + 1:
                yield _conversation([pair])


def _conversation(pairs: Iterable[tuple[str, str]]) -> list[Message]:
    messages = []
    for question, answer in pairs:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if _hash_of(messages[0]["content"])[0] % 8 == 0:
        messages.insert(0, {"role": "system", "content": SYSTEM})
    return messages


def _questions(entry: DocumentedObject, unique: bool) -> Iterator[tuple[str, str]]:
    """Yield questions about `entry` with their answers; ask for its module only if its short name is `unique`."""
    name, code = entry.name, f"`{entry.name}`"
    if entry.kind == "module":
        yield f"What kind of object is {code}?", f"{code} is a module."
    else:
        whole = "class" if entry.kind == "method" else "module"
        yield f"What kind of object is {code}?", f"{code} is a {entry.kind} of the {whole} `{entry.holder}`."
    if unique and entry.kind in ("class", "function"):
        yield (
            f"Which module has the {entry.kind} `{entry.short}`?",
            f"`{entry.short}` is in the module `{entry.module}`.",
        )
        yield f"How do I import `{entry.short}`?", f"`from {entry.module} import {entry.short}`"
    if entry.summary:
        yield f"What does {code} do?" if entry.kind != "module" else f"What is {code} for?", entry.summary
    if entry.signature is not None:
        yield f"What is the signature of {code}?", f"`{name}{entry.signature}`"
    if entry.parameters is not None and len(entry.parameters) <= MAX_PARAMETERS:
        names = [f"`{parameter}`" for parameter in entry.parameters]
        taken = _listed(names) if names else "none"
        yield f"Which parameters does {code} take?", f"`{entry.short}` takes {taken}."
    if entry.members:
        what = "methods" if entry.kind == "class" else "members"
        yield f"Name some {what} of {code}.", _listed([f"`{name}.{member}`" for member in entry.members]) + "."


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def _hash_of(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


# Trains a small byte-level BPE tokenizer in Qwen3's format, and adds a chat template in Qwen3's format.

PAD_TOKEN = "<|endoftext|>"  # noqa: S105 - a token of the vocabulary
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = [PAD_TOKEN, "<|im_start|>", END_OF_TURN]

# Tags that the template writes around thinking, calls and their results. As in Qwen3 each is one token but not a
# control token, so a text may contain them.
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def write_tokenizer(texts: Iterable[str], vocab_tokens: int, out: Path) -> None:
    """Train a tokenizer on `texts` and write its files to `out`. Equal texts give equal files."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated", invert=False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_tokens - len(MARKS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MARKS])
    tokenizer.save(str(out / TOKENIZER_NAME))
    write_json(
        out / TOKENIZER_CONFIG_NAME,
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": END_OF_TURN,
            "pad_token": PAD_TOKEN,
            "bos_token": None,
            "unk_token": None,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 4096,
        },
    )
    shutil.copyfile(Path(__file__).with_name(TEMPLATE_NAME), out / TEMPLATE_NAME)


# Builds a Qwen3 model folder with random weights of any size, for the demo and the tests.
# The weights are a pure function of the seed and the shapes, computed in integers until the last multiplication, so
# that every machine builds the same file.

WEIGHT_STD = 0.02
VOCAB_MULTIPLE = 128
FEED_FORWARD_MULTIPLE = 64
MAX_POSITIONS = 4096
_CHUNK = 1 << 20


def build_tiny(settings: TinyModel, out: Path, say: Say) -> None:
    """Write a model to `out` for the tokenizer in that folder, or for one trained here if there is none.

    Raises DataError if the tokenizer lacks an end-of-turn or padding token.
    """
    if not (out / TOKENIZER_NAME).exists():
        texts = [message["content"] for messages in conversations() for message in messages]
        write_tokenizer(texts, settings.vocab_tokens, out)
    ids = _token_ids(out)
    vocab_tokens = load_tokenizer(out).get_vocab_size()
    config = _config(settings, _round_up(vocab_tokens, VOCAB_MULTIPLE), ids)
    shapes = weight_shapes(config)
    parameters = sum(math.prod(shape) for shape in shapes.values())
    require_space(out, 4 * parameters, "the tiny model")
    weights = {name: _weight(shape, key_of(settings.seed, n)) for n, (name, shape) in enumerate(shapes.items())}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", {"eos_token_id": ids["eos"], "pad_token_id": ids["pad"]})
    say(f"download: built a Qwen3 of {parameters:,} parameters, vocabulary of {vocab_tokens:,} tokens")


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of a Qwen3 with tied embeddings."""
    hidden, head = config["hidden_size"], config["head_dim"]
    query, key_value = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    feed_forward = config["intermediate_size"]
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key_value, hidden),
        "self_attn.v_proj": (key_value, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (feed_forward, hidden),
        "mlp.up_proj": (feed_forward, hidden),
        "mlp.down_proj": (hidden, feed_forward),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return {**shapes, "model.norm.weight": (hidden,)}


def _config(settings: TinyModel, vocab_size: int, ids: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json in the format of transformers 5."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "float32",
        "eos_token_id": ids["eos"][0],
        "head_dim": settings.hidden_size // settings.heads,
        "hidden_act": "silu",
        "hidden_size": settings.hidden_size,
        "initializer_range": WEIGHT_STD,
        "intermediate_size": _round_up(3 * settings.hidden_size, FEED_FORWARD_MULTIPLE),
        "layer_types": ["full_attention"] * settings.layers,
        "max_position_embeddings": MAX_POSITIONS,
        "max_window_layers": settings.layers,
        "model_type": "qwen3",
        "num_attention_heads": settings.heads,
        "num_hidden_layers": settings.layers,
        "num_key_value_heads": settings.heads // 2,
        "pad_token_id": ids["pad"],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab_size,
    }


def _token_ids(folder: Path) -> dict[str, Any]:
    """Return the ids of the tokens that end a text (the end of a turn first), and of the padding token."""
    tokenizer: Tokenizer = load_tokenizer(folder)
    named = special_tokens(read_tokenizer_config(folder))
    ids = {role: tokenizer.token_to_id(named[role]) for role in ("eos_token", "pad_token") if role in named}
    for role in ("eos_token", "pad_token"):
        if ids.get(role) is None:
            raise DataError(f"{folder}: tokenizer_config.json names no {role} that the tokenizer has; add it")
    return {"eos": list(dict.fromkeys([ids["eos_token"], ids["pad_token"]])), "pad": ids["pad_token"]}


def _weight(shape: tuple[int, ...], key: int) -> NDArray[np.float32]:
    """Return ones for a vector (the weight of a norm), else random values with standard deviation `WEIGHT_STD`."""
    if len(shape) == 1:
        return np.ones(shape, dtype=np.float32)
    count = math.prod(shape)
    chunks = []
    for start in range(0, count, _CHUNK):
        # Approximately normal draws: centered sums of twelve uniforms, which have a variance of one.
        size = min(_CHUNK, count - start)
        total = bits(key, 3 * size, 3 * start).view("<u2").reshape(size, 12).sum(axis=1, dtype=np.int64)
        chunks.append(((total - 6 * 0xFFFF) / 0x10000).astype(np.float32))
    weight: NDArray[np.float32] = np.concatenate(chunks) * np.float32(WEIGHT_STD)
    return weight.reshape(shape)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
