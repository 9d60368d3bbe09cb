"""Instructions for calling a trained model: set the chat template's variables as in training."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline_lib.core import units
from pipeline_lib.core.language import _
from pipeline_lib.core.store import Manifest
from pipeline_lib.lineage.record import settings_in

THINKING_OFF, THINKING_ON = "thinking_off", "thinking_on"  # names of prompt counts, also in ledgers
_SWITCH = "enable_thinking"


@dataclass(frozen=True)
class Mode:
    """A setting of the template's variables, its number of trained answers, and if it is default.

    `enable_thinking` is None if the template has no such switch; `kwargs` are the other variables.
    """

    enable_thinking: bool | None
    answers: int
    is_default: bool
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, Any]:
        """All variables that a prompt of this mode is rendered with."""
        if self.enable_thinking is None:
            return dict(self.kwargs)
        return {_SWITCH: self.enable_thinking, **self.kwargs}

    @property
    def code(self) -> str:
        """The Python call that renders a prompt in this mode."""
        return (
            "tokenizer.apply_chat_template(messages, add_generation_prompt=True, "
            f"{self._arguments})"
        )

    @property
    def request(self) -> str:
        """The part of a server request (vLLM, SGLang) that selects this mode."""
        return f'"chat_template_kwargs": {json.dumps(self.variables, ensure_ascii=False)}'

    @property
    def trained(self) -> str:
        """The number of answers trained in this mode, as a clause without a final period."""
        answers = _("1 answer was")
        if self.answers != 1:
            answers = _("{number} answers were").format(number=units.count(self.answers))
        default = _(", the chat template's default") if self.is_default else ""
        text = _("{answers} trained with {arguments}{default}")
        return text.format(answers=answers, arguments=self._arguments, default=default)

    @property
    def _arguments(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.variables.items())


def trained_modes(
    prompts: Mapping[str, int],
    thinking_default: str | None,
    kwargs: Mapping[str, Any] | None = None,
) -> list[Mode]:
    """Return the counted `prompts`' modes, most frequent first; none without template variables.

    `thinking_default` is None if the template has no switch. `kwargs` are its other variables, as
    training set them.
    """
    kwargs = kwargs or {}
    if thinking_default is None:
        answers = sum(prompts.values())
        return [Mode(None, answers, False, kwargs)] if kwargs and answers else []
    modes = []
    for name, switch in ((THINKING_OFF, False), (THINKING_ON, True)):
        if prompts.get(name):
            is_default = name == f"thinking_{thinking_default}" and not kwargs
            modes.append(Mode(switch, prompts[name], is_default, kwargs))
    return sorted(modes, key=lambda mode: -mode.answers)


def warning_of(modes: Sequence[Mode]) -> str:
    """Return a warning about prompts without variables if none of `modes` is the default, or ""."""
    if not modes or any(mode.is_default for mode in modes):
        return ""
    names = _(" and ").join(modes[0].variables)
    text = _(
        "A call without {names} takes the chat template's default, under which no answer was trained."
    )
    return text.format(names=names)


def how_to_call(modes: Sequence[Mode]) -> list[str]:
    """Return each mode's line with Python call and server request, then the warning if any."""
    text = _("{trained}: call {code}, or a server with {request}")
    lines = []
    for mode in modes:
        lines.append(text.format(trained=mode.trained, code=mode.code, request=mode.request))
    if warning := warning_of(modes):
        lines.append(warning)
    return lines


def modes_in(tokenize: Manifest) -> list[Mode]:
    """Return the trained settings of the chat template's variables, from tokenize's manifest.

    Return no modes if the template has no variables, or if they are not known.
    """
    kwargs = settings_in(tokenize).get("chat_template_kwargs", {})
    prompts = tokenize.counts.get("prompts", {})
    return trained_modes(prompts, tokenize.counts.get("thinking_default"), kwargs)
