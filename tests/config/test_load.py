import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline_lib.config.load import load_config, load_configs
from pipeline_lib.config.schema import COLUMN_NAMES, Config
from pipeline_lib.config.strict_yaml import MAX_BYTES
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.data.row_fields import Fields
from pipeline_lib.data.tools import tools_of
from tests.config.keys import HUB, LOCAL, TINY, all_keys, plain, with_value

ROOT = Path(__file__).parents[2]
VALID = """\
experiment: demo
model: {source: tiny}
data:
  train: [{source: pydoc}]
"""
LINEARS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("in_proj_qkv", "in_proj_z", "out_proj"),  # of a gated delta rule
)
HEADS = "line 2: model: heads must be even, and hidden_size a multiple of twice the heads"
NO_ANCHORS = (
    "anchors and aliases (& and *) are not read; write the value out; a text that begins with * "
    "or & has to stand in quotes, as in '*.jsonl'"
)
A_TOOL = (
    'expected {"name": ..., "parameters": ...} or {"type": "function", "function": {"name": ...}}'
)
KWARGS = "tokenize.chat_template_kwargs"
NO_TRUTH = (
    "is text, and templates do not take it for a truth value: write true or false without quotes"
)
NO_VARIABLE = "is no value of a template variable: expected true, false, a whole number or text"
NO_TAGS = "tags (!) are not read; the key decides what type its value has"
NO_DIRECTIVES = "directives (%) are not read; YAML 1.2 it is"
KEYS = [key for key in all_keys() if not key.endswith(".source")]
NO_NAME = (
    "is not a name of up to 128 letters, digits, '.', '_', '-' and '=', the first a letter "
    "or a digit"
)

# Text after VALID, and all that is said of it, of line 5 unless it names another: the first line
# after VALID.
ADDED: dict[str, tuple[str, list[str]]] = {
    # unknown keys
    "near": ("trian: {}", ["trian: unknown key; did you mean 'train'?"]),
    "far": (
        "train: {learning_rate: 1.0}",
        ["train.learning_rate: unknown key; here it is train.lr"],
    ),
    "case": ("train: {Epochs: 1}", ["train.Epochs: unknown key; did you mean 'epochs'?"]),
    "hyphens": (
        "train: {keep-last: 5}",
        ["train.keep-last: unknown key; did you mean 'keep_last'?"],
    ),
    "dotted": ("train.lr: 1.0", ["'train.lr': unknown key; nest it, train: {lr: ...}"]),
    "deep": (
        "train: {method: lora, lora: {alfa: 3}}",
        ["train.lora.alfa: unknown key; did you mean 'alpha'?"],
    ),
    "of another section": (
        "train: {gpu: h200}",
        ["train.gpu: unknown key; here it is cluster.gpu"],
    ),
    "of several": (
        "seed: 4",
        [
            "seed: unknown key; here it is shard.seed or train.seed or evaluate.benchmarks.seed",
        ],
    ),
    "named like a source": ("  file: x", ["data.file: unknown key"]),
    # duplicates
    "duplicate": ("experiment: x", ["experiment: given twice, first in line 1"]),
    "duplicate below": (
        "train:\n  lr: 1.0\n  lr: 2.0",
        ["line 7: train.lr: given twice, first in line 6"],
    ),
    # YAML's traps, and types
    "no is a word": ("train: {lr: no}", ['train.lr: "no" is not a number']),
    "clock time is a word": ("train: {epochs: 12:30}", ['train.epochs: "12:30" is not a number']),
    "date is a word": (
        "train: {epochs: 2001-01-01}",
        ['train.epochs: "2001-01-01" is not a number'],
    ),
    "quoted number": ("train: {epochs: '1'}", ['train.epochs: "1" is not a number']),
    "fraction": ("train: {max_steps: 1.0}", ["train.max_steps: 1.0 is not a whole number"]),
    "truth": ("train: {epochs: true}", ["train.epochs: true is not a number"]),
    "nothing": ("train: {epochs: }", ["train.epochs: an empty value is not a number"]),
    "truth for text": (
        "train: {replica: true}",
        ["train.replica: true is not text; put it in quotes"],
    ),
    "word for section": ("train: fast", ['train: "fast" is not keys with values']),
    "empty section": ("train:", ["train: an empty value is not keys with values"]),
    "word for list": (
        "evaluate: {prompts: hi}",
        ['evaluate.prompts: "hi" is not a list; write [hi]'],
    ),
    "bad items": (
        "evaluate:\n  prompts:\n  - hi\n  - 3\n  - {a: b}",
        ['line 9: evaluate.prompts[2]: {"a": "b"} is not text'],
    ),
    "empty text": (
        "evaluate: {prompts: [ ~ ]}",
        ["evaluate.prompts[0]: an empty value is not text"],
    ),
    "tools that are none": (
        """tokenize:
  tools:
  - web_search
  - [a]
  - '[{"name": "a"}]'
  - {}
  - {name: ' ', parameters: {}}
  - '{"name": 3}'
  - {type: function, function: {}}
  - {type: function, function: web_search}
  - {type: retrieval, function: {name: a}}
  - {name: a}""",
        [
            f'line 7: tokenize.tools[0]: "web_search" is no object: {A_TOOL}',
            f'line 8: tokenize.tools[1]: ["a"] is no object: {A_TOOL}',
            f'line 9: tokenize.tools[2]: "[{{\\"name\\": \\"a\\"}}]" is no object: {A_TOOL}',
            f"line 10: tokenize.tools[3]: has no `name`: {A_TOOL}",
            f"line 11: tokenize.tools[4]: has no `name`: {A_TOOL}",
            f'line 12: tokenize.tools[5]: "{{\\"name\\": 3}}" has no `name`: {A_TOOL}',
            f"line 13: tokenize.tools[6]: has no `name`: {A_TOOL}",
            f"line 14: tokenize.tools[7]: is no function: {A_TOOL}",
            f"line 15: tokenize.tools[8]: is no function: {A_TOOL}",
        ],
    ),
    "a tool nested too deeply": (
        f"""tokenize: {{tools: ['{{"name": {"[" * 9000}']}}""",
        [f'tokenize.tools[0]: "{{\\"name\\": {"[" * 45}... is no object: {A_TOOL}'],
    ),
    "template variables": (
        """tokenize:
  chat_template_kwargs:
    enable_thinking: false
""",
        [
            f"line 6: {KWARGS}: `enable_thinking` cannot be set here: it is on where an answer has "
            "thinking; see tokenize.thinking and tokenize.prompt_thinking"
        ],
    ),
    "truth as text": (
        "tokenize: {chat_template_kwargs: {a: 'true'}}",
        [f'{KWARGS}: "true" {NO_TRUTH}'],
    ),
    "truth as word": (
        "tokenize: {chat_template_kwargs: {a: yes}}",
        [f'{KWARGS}: "yes" {NO_TRUTH}'],
    ),
    "list for a variable": (
        "tokenize: {chat_template_kwargs: {a: [low]}}",
        [f'{KWARGS}: ["low"] {NO_VARIABLE}'],
    ),
    "fraction for a variable": (
        "tokenize: {chat_template_kwargs: {a: 0.5}}",
        [f"{KWARGS}: 0.5 {NO_VARIABLE}"],
    ),
    "nothing for a variable": (
        "tokenize: {chat_template_kwargs: {a: }}",
        [f"{KWARGS}: an empty value {NO_VARIABLE}"],
    ),
    "not a number": ("train: {lr: .nan}", ['train.lr: ".nan" is not a number']),
    "too large": ("train: {lr: 1e999}", ['train.lr: "1e999" is not a number']),
    "integer too large": (
        "train: {seed: 9223372036854775808}",
        ['train.seed: "9223372036854775808" is not a whole number'],
    ),
    "thousands of digits": (
        f"train: {{seed: {'9' * 5000}}}",
        [f'train.seed: "{"9" * 56}... is not a whole number'],
    ),
    # ranges and choices
    "zero": ("train: {lr: 0}", ["train.lr: 0 should be greater than 0"]),
    "a cluster beyond all bounds": (
        "cluster: {nodes: 10001, gpus_per_node: 65, internode_gbit_s: 1e-300, intranode_gbyte_s: "
        "1e300, "
        "cpu_ranks: 1025}",
        [
            "cluster.nodes: 10001 should be less than or equal to 10000",
            "cluster.gpus_per_node: 65 should be less than or equal to 64",
            "cluster.internode_gbit_s: 1e-300 should be greater than or equal to 0.001",
            "cluster.intranode_gbyte_s: 1e+300 should be less than or equal to 100000",
            "cluster.cpu_ranks: 1025 should be less than or equal to 1024",
        ],
    ),
    "beyond all bounds": (
        "train: {lr: 1e300, epochs: 1000000000, timeout_s: 1000000000000, method: lora, lora: "
        "{rank: 100000}}",
        [
            "train.timeout_s: 1000000000000 should be less than or equal to 31622400",
            "train.epochs: 1000000000 should be less than or equal to 10000",
            "train.lr: 1e+300 should be less than or equal to 1000000000000000000000000000000",
            "train.lora.rank: 100000 should be less than or equal to 16384",
        ],
    ),
    "negative seed": ("shard: {seed: -1}", ["shard.seed: -1 should be greater than or equal to 0"]),
    "ranges": (
        "train: {epochs: -1, beta1: 1.0, warmup_fraction: 1.5, weight_decay: -0.1}",
        [
            "train.epochs: -1 should be greater than 0",
            "train.warmup_fraction: 1.5 should be less than or equal to 1",
            "train.weight_decay: -0.1 should be greater than or equal to 0",
            "train.beta1: 1.0 should be less than 1",
        ],
    ),
    "choice": (
        "train: {method: lroa}",
        ["train.method: \"lroa\" is not one of full, lora; did you mean 'lora'?"],
    ),
    "neither word nor list": (
        "train: {method: lora, lora: {targets: q_proj}}",
        ['train.lora.targets: "q_proj" is not one of all-linear, a list'],
    ),
    "empty list": (
        "train: {method: lora, lora: {targets: []}}",
        ["train.lora.targets: needs at least 1 item"],
    ),
    "bad item where a word may stand": (
        "train: {method: lora, lora: {targets: [1, q_proj]}}",
        [
            "train.lora.targets[0]: 1 is not one of "
            + ", ".join((*LINEARS, "experts.gate_up_proj", "experts.down_proj"))
        ],
    ),
    # between keys
    "batch not to be shared": (
        "train:\n  global_batch_tokens: 3072",
        [
            "line 6: train.global_batch_tokens: it has 3 blocks of 1024 tokens, and that is no "
            "multiple of 2 ranks x 1 block; try 4096"
        ],
    ),
    "lora without lora": (
        "train: {lora: {rank: 4}}",
        [
            "train.lora: has values, but train.method is 'full'; set train.method: lora or remove "
            "them"
        ],
    ),
    "several between keys": (
        "tokenize: {max_tokens: 2048}\ntrain:\n  global_batch_tokens: 100",
        [
            "tokenize.max_tokens: a sample of 2048 tokens does not fit a block of 1024; "
            "lower it or raise shard.block_tokens",
            "line 7: train.global_batch_tokens: 100 is not a multiple of shard.block_tokens "
            "(1024); try 1024",
        ],
    ),
    # YAML that is not read
    "glob": ("x: {path: *.jsonl}", [f"{NO_ANCHORS}"]),
    "alias": ("x: &a 1\ny: *a", [f"{NO_ANCHORS}", f"line 6: {NO_ANCHORS}"]),
    "anchor": ("tokenize: &a {max_tokens: 5}", [f"{NO_ANCHORS}"]),
    "merge key": ("train: {<<: {lr: 1}}", ["train.'<<': unknown key"]),
    "python tag": ("train: !!python/object/apply:os.system [ls]", [f"{NO_TAGS}"]),
    "list as key": ("? [a, b]\n: c", ["the file: a key has to be a word"]),
    "keys of other types": (
        "1: x\ntrue: y\nnull: z",
        ["1: unknown key", "line 6: true: unknown key", "line 7: null: unknown key"],
    ),
    "deep mapping": ("x: " + "{a: " * 5000 + "1" + "}" * 5000, ["nested more than 20 deep"]),
    "deep blocks": (
        "".join(f"{' ' * depth}a:\n" for depth in range(300)),
        ["line 25: nested more than 20 deep"],
    ),
    "half a surrogate pair": (
        'train: {replica: "\\ud800"}',
        ["train.replica: holds half of a surrogate pair"],
    ),
}

# Whole files, and all that is said of them.
WHOLE: dict[str, tuple[str, list[str]]] = {
    "empty": ("", ["holds no keys; config/config.yaml is an example"]),
    "list": ("- a\n- b\n", ['the file: ["a", "b"] is not keys with values']),
    "no keys": (
        "{}\n",
        [f"{key}: missing; it has no default" for key in ("experiment", "model", "data")],
    ),
    "alias bomb": (
        "a: &a [x,x]\n"
        + "".join(f"{b}: &{b} [*{a},*{a}]\n" for a, b in itertools.pairwise("abcdefgh")),
        [f"line {line}: {NO_ANCHORS}" for line in range(1, 9)],
    ),
    "yaml 1.1": (f"%YAML 1.1\n---\n{VALID}train: {{epochs: 010}}\n", [f"line 1: {NO_DIRECTIVES}"]),
    "huge": (f"{VALID}#{'x' * MAX_BYTES}", [f"larger than {MAX_BYTES} bytes: not a config file"]),
    "truth as name": (
        VALID.replace("demo", "true"),
        ["line 1: experiment: true is not text; put it in quotes"],
    ),
    "path as name": (VALID.replace("demo", "../x"), [f'line 1: experiment: "../x" {NO_NAME}']),
    "name with newline": (
        VALID.replace("demo", '"x\\n"'),
        [f'line 1: experiment: "x\\n" {NO_NAME}'],
    ),
    "name without its owner": (
        VALID.replace("tiny}", "huggingface, name: Qwen3-8B}"),
        ['line 2: model.name: "Qwen3-8B" is not owner/name, as in Qwen/Qwen3-8B'],
    ),
    "rope that shrinks": (
        VALID.replace("tiny}", "tiny, rope: {type: yarn, factor: 0.5}}"),
        ["line 2: model.rope.factor: 0.5 should be greater than or equal to 1"],
    ),
    "rope of another kind": (
        VALID.replace("tiny}", "tiny, rope: {type: linear, factor: 2}}"),
        ['line 2: model.rope.type: "linear" is not one of yarn'],
    ),
    "rope without a factor": (
        VALID.replace("tiny}", "tiny, rope: {type: yarn}}"),
        ["line 2: model.rope.factor: missing; it has no default"],
    ),
    "no source": (
        VALID.replace("source: tiny", "layers: 2"),
        [
            "line 2: model.source: missing; it is one of tiny, local, huggingface, modelscope, experiment"
        ],
    ),
    "unknown source": (
        VALID.replace("tiny", "tinny"),
        [
            'line 2: model.source: "tinny" is not one of tiny, local, huggingface, modelscope, '
            "experiment; did you mean 'tiny'?"
        ],
    ),
    "list as source": (
        VALID.replace("tiny", "[tiny]"),
        [
            'line 2: model.source: ["tiny"] is not one of tiny, local, huggingface, modelscope, '
            "experiment; did you mean 'tiny'?"
        ],
    ),
    "no model": (
        VALID.replace("{source: tiny}", ""),
        ["line 2: model: an empty value is not keys with values"],
    ),
    "key of the source": (
        VALID.replace("tiny}", "local}"),
        ["line 2: model.path: missing; it has no default"],
    ),
    "key of another source": (
        VALID.replace("tiny}", "local, path: x, layers: 3}"),
        ["line 2: model.layers: unknown key where source is local"],
    ),
    "columns called as other tools do": (
        VALID.replace(
            "pydoc", "file, path: x, columns: {response: a, systm: b, q: prompt, label: ignore}"
        ),
        [
            f"line 4: data.train[0].columns: 'response' is not one of {', '.join(COLUMN_NAMES)}; "
            "did you mean 'output' "
            f"or 'completion'?; 'systm' is not one of {', '.join(COLUMN_NAMES)}; did you mean "
            "'system'?; write our "
            "name first and the file's second, {prompt: q}"
        ],
    ),
    "key called as the source": (
        VALID.replace("tiny}", "tiny, tiny: 3}"),
        ["line 2: model.tiny: unknown key where source is tiny"],
    ),
    "heads": (VALID.replace("tiny}", "tiny, heads: 3}"), [HEADS]),
    "no sources": (
        VALID.replace("[{source: pydoc}]", "[]"),
        ["line 4: data.train: needs at least 1 item"],
    ),
    "no list of sources": (
        VALID.replace("[{source: pydoc}]", "pydoc"),
        ['line 4: data.train: "pydoc" is not a list; write train: [{source: file, path: pydoc}]'],
    ),
    "word as source": (
        VALID.replace("{source: pydoc}", "pydoc"),
        ['line 4: data.train[0]: "pydoc" is not keys with values'],
    ),
    "several sources": (
        VALID.replace(
            "[{source: pydoc}]",
            "\n  - source: pydoc\n  - source: fil\n  - {source: file, pth: x, format: alpca}",
        ),
        [
            'line 6: data.train[1].source: "fil" is not one of pydoc, file, huggingface, '
            "modelscope; did you mean 'file'?",
            'line 7: data.train[2].format: "alpca" is not one of auto, alpaca, sharegpt, messages, '
            "prompt_completion, text; did you mean 'alpaca'?",
            "line 7: data.train[2].path: missing; it has no default",
            "line 7: data.train[2].pth: unknown key where source is file; did you mean 'path'?",
        ],
    ),
}

# Files that are not YAML, and how the one problem begins.
BROKEN: dict[str, tuple[bytes, str]] = {
    "tab": (b"experiment: x\ntrain:\n\tlr: 1\n", "line 3: not YAML: "),
    "open brace": (VALID.encode() + b"train: {lr: 1\n", "line 6: not YAML: "),
    "two documents": (VALID.encode() + b"---\n" + VALID.encode(), "line 5: not YAML: "),
    "Latin-1": (VALID.encode() + b"x: caf\xe9\n", "line 5: not UTF-8"),
    "UTF-16": (VALID.encode("utf-16"), "line 1: not UTF-8"),
    "NUL": (VALID.encode() + b"\0\0", "line 5: not YAML: no text holds U+0000"),
    "unknown alias": (VALID.encode() + b"x: *a\n", f"line 5: {NO_ANCHORS}"),
}


def problems_of(path: Path) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert raised.value.source == str(path)
    return raised.value.problems


def written(folder: Path, content: str | bytes) -> Path:
    path = folder / "config.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(("text", "said"), ADDED.values(), ids=ADDED)
def test_every_mistake_is_named(tmp_path: Path, text: str, said: list[str]) -> None:
    lines = [problem if problem.startswith("line ") else f"line 5: {problem}" for problem in said]

    assert problems_of(written(tmp_path, VALID + text + "\n")) == lines


@pytest.mark.parametrize(("text", "said"), WHOLE.values(), ids=WHOLE)
def test_every_mistake_of_a_whole_file_is_named(tmp_path: Path, text: str, said: list[str]) -> None:
    assert problems_of(written(tmp_path, text)) == said


@pytest.mark.parametrize(("content", "begins"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_not_yaml_is_one_problem(
    tmp_path: Path, content: bytes, begins: str
) -> None:
    [problem] = problems_of(written(tmp_path, content))

    assert problem.startswith(begins)


def test_a_file_that_cannot_be_read_is_one_problem(tmp_path: Path) -> None:
    assert problems_of(tmp_path / "none.yaml") == ["cannot be read: No such file or directory"]
    assert problems_of(tmp_path) == ["cannot be read: Is a directory"]


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    text = (
        "model: {source: tinny}\ntokenize: {max_tokens: no}\ntrain:\n  lr: .nan\n  epoch: 2\n  "
        "epochs: 0\n"
    )

    assert problems_of(written(tmp_path, text)) == [
        "experiment: missing; it has no default",
        'line 1: model.source: "tinny" is not one of tiny, local, huggingface, modelscope, '
        "experiment; did you mean 'tiny'?",
        "data: missing; it has no default",
        'line 2: tokenize.max_tokens: "no" is not a whole number',
        "line 6: train.epochs: 0 should be greater than 0",
        'line 4: train.lr: ".nan" is not a number',
        "line 5: train.epoch: unknown key; did you mean 'epochs'?",
    ]


@pytest.mark.parametrize(
    ("text", "section", "key", "value"),
    [
        ("train: {lr: 1e-4}", "train", "lr", 1e-4),
        ("train: {lr: +.5e-3}", "train", "lr", 5e-4),
        ("train: {lr: 1}", "train", "lr", 1.0),
        ("train: {epochs: 010}", "train", "epochs", 10),
        ("train: {epochs: 0x10}", "train", "epochs", 16),
        ("train: {epochs: 0o10}", "train", "epochs", 8),
        ("train: {epochs: +3}", "train", "epochs", 3),
        ("train: {global_batch_tokens: 131_072}", "train", "global_batch_tokens", 131072),
        ("train: {replica: no}", "train", "replica", "no"),
        ("train: {replica: 12:30}", "train", "replica", "12:30"),
        ("train: {replica: 2001-01-01}", "train", "replica", "2001-01-01"),
        ("train: {replica: '010'}", "train", "replica", "010"),
        ("train: {replica: 010}", "train", "replica", "010"),
        ("train: {replica: 1.10}", "train", "replica", "1.10"),
        ("train: {replica: 1e5}", "train", "replica", "1e5"),
        ("cluster: {gpu: 4090}", "cluster", "gpu", "4090"),
        ("evaluate: {prompts: [007, 0x1F]}", "evaluate", "prompts", ("007", "0x1F")),
        ("train: {replica: ~}", "train", "replica", None),
        ("tokenize: {prompt_thinking: off}", "tokenize", "prompt_thinking", "off"),
        ("tokenize: {prompt_thinking: on}", "tokenize", "prompt_thinking", "on"),
        (
            "tokenize: {chat_template_kwargs: {a: true}}",
            "tokenize",
            "chat_template_kwargs",
            {"a": True},
        ),
        (
            "tokenize: {chat_template_kwargs: {a: low, b: 3}}",
            "tokenize",
            "chat_template_kwargs",
            {"a": "low", "b": 3},
        ),
        ("evaluate: {prompts: [yes, on, '']}", "evaluate", "prompts", ("yes", "on", "")),
        ("evaluate: {prompts: ['\u4f60\u597d']}", "evaluate", "prompts", ("\u4f60\u597d",)),
    ],
)
def test_values_mean_what_they_look_like(
    tmp_path: Path, text: str, section: str, key: str, value: object
) -> None:
    found = getattr(getattr(load_config(written(tmp_path, f"{VALID}{text}\n")), section), key)

    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "tool",
    [
        "{name: clock, parameters: {type: object}}",
        "{type: function, function: {name: clock}}",
        "{function: {name: clock}}",
        """{function: '{"name": "clock"}'}""",
        """' {"type": "function", "function": {"name": "clock"}}'""",
    ],
)
def test_tools_may_be_written_as_those_of_rows(tmp_path: Path, tool: str) -> None:
    found = load_config(written(tmp_path, f"{VALID}tokenize: {{tools: [{tool}]}}\n")).tokenize.tools

    read = (tools_of(Fields({"tools": list(found)}, {})) or [{}])[0]
    assert read["function"]["name"] == "clock"


@pytest.mark.parametrize(
    "content", [VALID, "\ufeff" + VALID, "---\n" + VALID + "...\n", VALID.replace("\n", "\r\n")]
)
def test_a_byte_order_mark_and_the_like_are_no_mistakes(tmp_path: Path, content: str) -> None:
    assert load_config(written(tmp_path, content)) == Config.model_validate_json(
        json.dumps(TINY | {"train": {}})
    )


@pytest.mark.parametrize("key", KEYS)
def test_a_wrong_type_is_named_for_every_key(tmp_path: Path, key: str) -> None:
    [problem] = problems_of(written(tmp_path, json.dumps(with_value(key, [[]]))))

    where = plain(key).replace("data.train.", "data.train[0].")
    assert problem.startswith(f"line 1: {where}")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "config").rglob("*.yaml")), ids=lambda path: path.name
)
def test_the_shipped_configs_have_no_problems(path: Path) -> None:
    assert load_config(path).experiment


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.lr=1e-4", "train.lr", 1e-4),
        ("train.epochs=010", "train.epochs", 10),
        ("train.replica=a=b", "train.replica", "a=b"),
        ("train.replica=", "train.replica", None),
        ("train.lora={rank: 4}", "train.lora.rank", 4),
        ("evaluate.prompts=[hi, 'no']", "evaluate.prompts", ("hi", "no")),
        ("experiment=other", "experiment", "other"),
    ],
)
def test_an_override_replaces_what_the_file_says(
    tmp_path: Path, override: str, key: str, value: object
) -> None:
    text = "train: {lr: 1.0, epochs: 2, replica: mine, method: lora}\nevaluate: {}\n"
    found: Any = load_config(written(tmp_path, VALID + text), [override])
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value


def test_overrides_fit_together_before_they_are_checked(tmp_path: Path) -> None:
    path = written(tmp_path, VALID)
    overrides = [
        "cluster.nodes=4",
        "cluster.internode_gbit_s=9",
        "data.train[0].max_rows=7",
    ]
    config = load_config(path, overrides)
    assert (config.cluster.nodes, config.cluster.internode_gbit_s) == (4, 9.0)
    assert config.data.train[0].model_dump()["max_rows"] == 7
    assert load_config(path).cluster.nodes == 1


def test_a_key_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    """The last one counted in silence, under the names of both."""
    path = written(tmp_path, VALID)
    with pytest.raises(ConfigError, match="--what-if cluster.gpu: given 2 times .4090 and h100."):
        load_config(path, ["cluster.gpu=4090", "cluster.gpu=h100"])


# Overrides of VALID with a train section in line 5, and all that is said of them.
OVERRIDDEN: dict[str, tuple[list[str], list[str]]] = {
    "near": (
        ["train.lrr=1"],
        ["--what-if train.lrr=1: train.lrr: unknown key; did you mean 'lr'?"],
    ),
    "no such section": (
        ["trian.lr=1"],
        ["--what-if trian.lr=1: trian: unknown key; did you mean 'train'?"],
    ),
    "type": (["train.lr=no"], ['--what-if train.lr=no: train.lr: "no" is not a number']),
    "no value": (
        ["train.lr"],
        ["--what-if train.lr: not of the form KEY=VALUE, as in --what-if cluster.nodes=2"],
    ),
    "no key": (
        ["=1"],
        ["--what-if =1: not of the form KEY=VALUE, as in --what-if cluster.nodes=2"],
    ),
    "below a value": (
        ["experiment.x=1"],
        [
            "--what-if experiment.x=1: experiment.x: the file has a value or a list there, and no "
            "keys"
        ],
    ),
    "far below a value": (
        ["experiment.x.y=1"],
        ["--what-if experiment.x.y=1: experiment.x: there is no such section in the file"],
    ),
    "no such source": (
        ["data.train[1].weight=2"],
        ["--what-if data.train[1].weight=2: data.train[1]: there is no such section in the file"],
    ),
    "a key given twice": (
        ["train={lr: 1, lr: 2}"],
        ["--what-if train={lr: 1, lr: 2}: line 1: lr: given twice, first in line 1"],
    ),
    "anchor": (["train.lr=&a 1"], [f"--what-if train.lr=&a 1: line 1: {NO_ANCHORS}"]),
    "beside the file's own": (
        ["train.lr=no"],
        [
            '--what-if train.lr=no: train.lr: "no" is not a number',
            "line 5: train.epoch: unknown key; did you mean 'epochs'?",
        ],
    ),
    "where keys do not fit": (
        ["train.keep_best=true"],
        ["--what-if train.keep_best=true: train.keep_best: needs "],
    ),
}


@pytest.mark.parametrize(("overrides", "said"), OVERRIDDEN.values(), ids=OVERRIDDEN)
def test_what_is_wrong_with_an_override_names_the_flag(
    tmp_path: Path, overrides: list[str], said: list[str]
) -> None:
    train = "train: {epoch: 1}\n" if len(said) > 1 else "train: {epochs: 1}\n"
    with pytest.raises(ConfigError) as raised:
        load_config(written(tmp_path, VALID + train), overrides)
    assert len(raised.value.problems) == len(said)
    for problem, begins in zip(raised.value.problems, said, strict=True):
        assert problem.startswith(begins)


FUZZ = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
YAML_LIKE = st.text(
    st.sampled_from("abz019 :-[]{},#&*!|>'\"%@`?~<=.+_\n\t\\\u2028\ufeff\x85"), max_size=80
)
FULL = json.dumps(with_value("train.lora.rank", 8) | {"tokenize": {"max_tokens": 256}}, indent=1)


def check_that_only_a_config_error_comes(path: Path, content: str | bytes) -> None:
    path.write_bytes(
        content.encode(errors="surrogatepass") if isinstance(content, str) else content
    )
    try:
        config = load_config(path)
    except ConfigError as error:
        assert error.problems
        assert all(problem.strip() for problem in error.problems)
        str(error).encode()
    else:
        assert Config.model_validate_json(config.model_dump_json()) == config


@FUZZ
@given(content=st.one_of(YAML_LIKE, st.text(max_size=60), st.binary(max_size=60)))
def test_whatever_stands_in_the_file_only_a_config_error_comes(
    tmp_path: Path, content: str | bytes
) -> None:
    check_that_only_a_config_error_comes(tmp_path / "config.yaml", content)


@FUZZ
@given(override=st.one_of(YAML_LIKE, st.builds("{}={}".format, st.sampled_from(KEYS), YAML_LIKE)))
def test_whatever_an_override_is_only_a_config_error_comes(tmp_path: Path, override: str) -> None:
    path = written(tmp_path, FULL)
    try:
        config = load_config(path, [override])
    except ConfigError as error:
        assert error.problems
        str(error).encode()
    else:
        assert Config.model_validate_json(config.model_dump_json()) == config


@FUZZ
@given(
    base=st.sampled_from([VALID, FULL]),
    start=st.integers(0, 400),
    length=st.integers(0, 12),
    text=YAML_LIKE,
)
def test_however_a_config_is_mangled_only_a_config_error_comes(
    tmp_path: Path, base: str, start: int, length: int, text: str
) -> None:
    start = start % len(base)
    check_that_only_a_config_error_comes(
        tmp_path / "config.yaml", base[:start] + text + base[start + length :]
    )


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["tiny", "file"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@FUZZ
@given(
    key=st.sampled_from([*KEYS, "model", "data", "data.train", "train", "train.lora"]), value=VALUES
)
def test_whatever_value_a_key_has_it_is_taken_or_the_key_is_named(
    tmp_path: Path, key: str, value: object
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(with_value(key, value)))
    try:
        load_config(path)
    except ConfigError as error:
        # What does not fit together with other keys is told of the key to change, which is the
        # batch.
        named = (plain(key).rpartition(".")[2], "train.global_batch_tokens")
        assert any(name in problem for problem in error.problems for name in named), error.problems


def test_a_number_is_a_name_as_it_is_written(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        VALID.replace("demo", "007") + "sweep: {train.seed: [1, 2], train.replica: [01]}\n",
    )
    assert [config.experiment for config in load_configs(path)] == ["007-seed=1", "007-seed=2"]
    assert load_configs(path)[0].train.replica == "01"
    assert load_config(written(tmp_path, VALID.replace("demo", "007"))).experiment == "007"


def test_the_examples_of_the_tests_are_valid(tmp_path: Path) -> None:
    for example in (TINY, LOCAL, HUB):
        assert load_config(written(tmp_path, json.dumps(example)))


@pytest.mark.parametrize(
    ("cluster", "train", "strategy"),
    [
        ("{cpu_ranks: 2}", "{}", "ddp"),
        ("{gpus_per_node: 2}", "{}", "ddp"),
        ("{gpus_per_node: 2, gpu: h200}", "{}", "auto"),
        ("{gpus_per_node: 2, gpu: h200}", "{micro_batch_blocks: 4}", "auto"),
        ("{gpus_per_node: 2, gpu: h200}", "{strategy: ddp}", "ddp"),
        ("{gpus_per_node: 2, gpu: h200}", "{local_sgd_steps: 4}", "ddp"),
    ],
)
def test_a_strategy_that_is_left_out_is_the_plans_where_it_knows_the_gpus(
    tmp_path: Path, cluster: str, train: str, strategy: str
) -> None:
    """`local_sgd_steps` wants a strategy by name, and had the default."""
    path = tmp_path / "own.yaml"
    path.write_text(f"{VALID}cluster: {cluster}\ntrain: {train}\n", encoding="utf-8")
    assert load_config(path).train.strategy == strategy
