"""Commands of other tools, as their documentation and shell scripts print them.

Nothing is run: a command is read word by word, with the variables that the text itself sets.
"""

import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
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
_PROGRAMS = {program for program, _ in _TRAINS} | {"megatron"} | set(_LAUNCHERS)
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
    commands = _commands(text)
    trainings = [one for one in commands if one.start in _TRAINS]
    if len(trainings) == 1:  # what follows it in articles uses the model
        commands = trainings
    if not commands:
        return None
    if len(commands) > 1:
        starts = ", ".join(" ".join(one.start) for one in commands)
        raise ConfigError(source, [f"holds several commands ({starts}): keep one of them"])
    words = _words(commands[0].line, commands[0].variables, source)
    return _parts(words, commands[0].variables, source)


@dataclass(frozen=True)
class _Line:
    """A command's line from its program on, and the variables that the text sets for it."""

    line: str
    variables: dict[str, str]

    @property
    def start(self) -> tuple[str, ...]:
        """The program, and the word after it."""
        return tuple(self.line.split()[:2])


def _commands(text: str) -> list[_Line]:
    """Return the lines of `text` that start a program known here."""
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
            command = line[at.start() :] if at else line
            commands.append(_Line(command, environment))
    # a variable may also be set below
    return [_Line(one.line, variables | one.variables) for one in commands]


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
    is_end = _END_OF_COMMAND.fullmatch
    return list(takewhile(lambda word: not is_end(word), words))


def _quotient(match: re.Match[str]) -> str:
    """Return what `$(expr 16 / 2)` is, as ms-swift's examples write the accumulation."""
    divisor = int(match[2])
    return str(int(match[1]) // divisor) if divisor else match[0]


def _filled(text: str, variables: dict[str, str]) -> str:
    """Return `text` with the known ones of its variables, such as `$N` or `${N}`, filled in."""
    return _VARIABLE.sub(lambda match: variables.get(match[1], match[0]), text)


def _parts(words: list[str], variables: dict[str, str], source: str) -> Command:
    """Return the arguments of the training, and before them those of what starts its ranks."""
    program = words[0]
    first = words[1] if len(words) > 1 else ""
    environment = {}
    for name, ours in _ENVIRONMENT.items():
        if name in variables:
            environment[ours] = scalar(variables[name])
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
    at = _place_of_script(words)
    if at is None:
        raise ConfigError(source, [f"`{words[0]}` starts no script that ends in .py"])
    name = PurePath(words[at]).name.removesuffix(".py").rpartition(".")[2]
    _refuse_others(name, words[at], source)
    options = _options(word for word in words[1:at] if word not in ("-m", "launch"))
    launcher = environment | {_LAUNCHER_NAMES.get(key, key): options[key] for key in options}
    if name == "sft":
        tool = SWIFT if "swift" in words[at] else TRL
    elif "axolotl" in words[at]:
        tool = AXOLOTL
    else:
        tool = ARGUMENTS
    parts = [(tool, _options(words[at + 1 :]))]
    if launcher:
        parts.append((ACCELERATE, launcher))
    return parts


def _place_of_script(words: list[str]) -> int | None:
    """Return the place in `words` of the script, or of the module after `-m`."""
    for number in range(1, len(words)):
        if words[number].endswith(".py") or words[number - 1] == "-m":
            return number
    return None


def _options(words: Iterable[str]) -> dict[str, Any]:
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
