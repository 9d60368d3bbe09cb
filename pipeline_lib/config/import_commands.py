"""Commands of other tools, as their documentation and shell scripts print them.

Nothing is run: a command is read word by word, with the variables that the text itself sets.
"""

import json
import re
import shlex
from pathlib import PurePath
from typing import Any

from pipeline_lib.config.import_tools import (
    ACCELERATE,
    ARGUMENTS,
    AXOLOTL,
    LLAMA_FACTORY,
    NO_PREFERENCES,
    SWIFT,
    TRL,
)
from pipeline_lib.core.errors import ConfigError

# By the program and its first word.
_TRAINS = {
    ("swift", "sft"): SWIFT,
    ("swift", "pt"): SWIFT,
    ("trl", "sft"): TRL,
    ("axolotl", "train"): AXOLOTL,
    ("llamafactory-cli", "train"): LLAMA_FACTORY,
}
_LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "python", "python3")
_PROGRAMS = (*dict.fromkeys(program for program, _ in _TRAINS), "megatron", *_LAUNCHERS)
_OF_PREFERENCES = ("dpo", "grpo", "kto", "reward", "rloo", "ppo", "orpo", "cpo", "gkd", "rlhf")
_BEFORE_PROGRAMS = ("nohup", "exec", "time")
_ENVIRONMENT = {
    "NPROC_PER_NODE": "nproc_per_node",
    "NNODES": "num_machines",
    "USE_HF": "use_hf",
    "CUDA_VISIBLE_DEVICES": "cuda_visible_devices",
}
_LAUNCHER_NAMES = {"nnodes": "num_machines", "num_gpus": "nproc_per_node"}
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)")
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
_QUOTIENT = re.compile(r"\$\(expr (\d{1,9}) / (\d{1,9})\)")
_END_OF_COMMAND = re.compile(r"[|&;<>]+|\d?>+&?\d?")

Command = list[tuple[str, dict[str, Any]]]  # kinds of files, and the keys that one would have


def read_command(text: str, source: str) -> Command | None:
    """Return what the command in `text` says, as if by files; None if `text` holds no command.

    Raises ConfigError for several commands, and for one that trains nothing that exists here.
    """
    variables: dict[str, str] = {}
    commands = []
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        words = line.removeprefix("export ").split()
        environment: dict[str, str] = {}
        while words and (match := _ASSIGNMENT.fullmatch(words[0])):
            known = variables | environment
            environment[match[1]] = _filled(match[2].strip("'\""), known)
            words = words[1:]
        if words and words[0] in _BEFORE_PROGRAMS:
            words = words[1:]
        if not words:
            variables |= environment
        elif words[0] in _PROGRAMS:
            at = re.search(rf"(^|\s){re.escape(words[0])}\s", f"{line} ")
            commands.append((environment, line[at.start() if at else 0 :]))
    if not commands:
        return None
    trainings = [one for one in commands if tuple(one[1].split()[:2]) in _TRAINS]
    if len(trainings) == 1:  # what follows it in articles uses the model
        commands = trainings
    if len(commands) > 1:
        starts = ", ".join(" ".join(line.split()[:2]) for _, line in commands)
        raise ConfigError(source, [f"holds several commands ({starts}): keep one of them"])
    [(environment, line)] = commands
    words = _words(line, variables | environment, source)
    return _parts(words, variables | environment, source)


def _words(line: str, variables: dict[str, str], source: str) -> list[str]:
    """Return the words of a command, with its variables filled in."""
    filled = _QUOTIENT.sub(_quotient, _filled(line, variables))
    if left := re.search(r"\$[({@\w][^ ]*|`", filled):
        text = f"{left[0]} is not evaluated: write its value into the command"
        raise ConfigError(source, [text])
    try:
        words = shlex.split(filled)
    except ValueError as error:
        raise ConfigError(source, [f"not a command: {error}"]) from error
    ends = [number for number, word in enumerate(words) if _END_OF_COMMAND.fullmatch(word)]
    return words[: ends[0]] if ends else words


def _quotient(match: re.Match[str]) -> str:
    """Return what `$(expr 16 / 2)` is, as ms-swift's examples write the accumulation."""
    divisor = int(match[2])
    return str(int(match[1]) // divisor) if divisor else match[0]


def _filled(text: str, variables: dict[str, str]) -> str:
    """Return `text` with the known ones of its variables, such as `$N` or `${N}`, filled in."""
    return _VARIABLE.sub(lambda match: variables.get(match[1], match[0]), text)


def _parts(words: list[str], variables: dict[str, str], source: str) -> Command:
    """Return the arguments of the training, and before them those of what starts its ranks."""
    program, first = words[0], "".join(words[1:2])
    environment = {
        ours: scalar(variables[name]) for name, ours in _ENVIRONMENT.items() if name in variables
    }
    if program == "megatron":
        text = (
            f"`megatron {first}` splits a model over tensors and stages, which does not exist "
            f"here; write the same model, data and adapters as `swift {first}`"
        )
        raise ConfigError(source, [text])
    if program in _LAUNCHERS:
        return _launched(words, environment, source)
    _refuse_others(first, " ".join(words[:2]), source)
    tool = _TRAINS.get((program, first))
    if tool is None:
        may = ", ".join(" ".join(pair) for pair in _TRAINS if pair[0] == program)
        raise ConfigError(source, [f"`{program} {first}` does not train; expected {may}"])
    options = environment | _options(words[2:])
    if (program, first) == ("swift", "pt"):
        options.setdefault("loss_scale", "all")
    return [(tool, options)]


def _refuse_others(name: str, command: str, source: str) -> None:
    """Raise ConfigError if `name`, a script or the word after a program, trains on preferences."""
    if any(re.match(rf"{word}(_|\b|$)", name) for word in _OF_PREFERENCES):
        raise ConfigError(source, [f"`{command}`: {NO_PREFERENCES}"])


def _launched(words: list[str], environment: dict[str, Any], source: str) -> Command:
    """Return the launcher's options and the script's; the script decides whose arguments it has."""
    if words[1:3] == ["-m", "torch.distributed.run"]:
        words = ["torchrun", *words[3:]]
    scripts = [
        number
        for number, word in enumerate(words[1:], 1)
        if word.endswith(".py") or words[number - 1] == "-m"
    ]
    if not scripts:
        raise ConfigError(source, [f"`{words[0]}` starts no script that ends in .py"])
    at = scripts[0]
    name = PurePath(words[at]).name.removesuffix(".py").rpartition(".")[2]
    _refuse_others(name, words[at], source)
    options = _options(word for word in words[1:at] if word not in ("-m", "launch"))
    launcher = environment | {_LAUNCHER_NAMES.get(key, key): options[key] for key in options}
    is_swift = "swift" in words[at]
    if name == "sft":
        tool = SWIFT if is_swift else TRL
    elif "axolotl" in words[at]:
        tool = AXOLOTL
    else:
        tool = ARGUMENTS
    parts: Command = [(tool, _options(words[at + 1 :]))]
    return [*parts, (ACCELERATE, launcher)] if launcher else parts


def _options(words: Any) -> dict[str, Any]:
    """Return the values by option; of an option without one, true. A lone file is `config`."""
    given: dict[str, list[Any]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").partition("=")
            name = name.replace("-", "_")
            given[name] = [scalar(value)] if value else []
        elif name:
            given[name].append(scalar(word))
        elif "=" in word:
            key, _, value = word.partition("=")
            given[key] = [scalar(value)]
        else:
            given.setdefault("config", []).append(word)
    return {name: _value(values) for name, values in given.items()}


def _value(values: list[Any]) -> Any:
    if not values:
        return True
    return values[0] if len(values) == 1 else values


def scalar(word: str) -> Any:
    """Return the number, truth value, list or object that `word` is, or else `word`."""
    try:
        return json.loads(word.lower() if word in ("True", "False") else word)
    except (ValueError, RecursionError):
        return word
