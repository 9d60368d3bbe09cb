"""How a trained model has to be called: with the switch for thinking of its chat template as it was in training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

THINKING_OFF, THINKING_ON = "thinking_off", "thinking_on"  # names of counts of prompts; ledgers hold them


@dataclass(frozen=True)
class Mode:
    """A value of the switch, and the answers trained with it. `is_default`: it holds where the switch is not given."""

    enable_thinking: bool
    answers: int
    is_default: bool

    @property
    def code(self) -> str:
        """The call that renders such a prompt."""
        switch = f"enable_thinking={self.enable_thinking}"
        return f"tokenizer.apply_chat_template(messages, add_generation_prompt=True, {switch})"

    @property
    def request(self) -> str:
        """What a request to a server (vLLM, SGLang) holds for such a prompt."""
        return f'"chat_template_kwargs": {{"enable_thinking": {str(self.enable_thinking).lower()}}}'

    @property
    def trained(self) -> str:
        """How many answers were trained so, as a sentence without its end."""
        default = ", the chat template's default" if self.is_default else ""
        answers = "1 answer was" if self.answers == 1 else f"{self.answers:,} answers were"
        return f"{answers} trained with enable_thinking={self.enable_thinking}{default}"


def trained_modes(prompts: Mapping[str, int], thinking_default: str | None) -> list[Mode]:
    """The modes of counted `prompts`, the more frequent first; none where the template has no switch (None)."""
    if thinking_default is None:
        return []
    names = {THINKING_OFF: False, THINKING_ON: True}
    modes = [
        Mode(switch, prompts[name], name == f"thinking_{thinking_default}")
        for name, switch in names.items()
        if prompts.get(name)
    ]
    return sorted(modes, key=lambda mode: -mode.answers)


def warning_of(modes: Sequence[Mode]) -> str:
    """What to know of prompts without the switch, if none of `modes` is the default; else the empty text."""
    if not modes or any(mode.is_default for mode in modes):
        return ""
    return "No answer was trained under the chat template's default, which holds where enable_thinking is not given."


def how_to_call(modes: Sequence[Mode]) -> list[str]:
    """A line for each mode with the code and the request, and the warning."""
    lines = [f"{mode.trained}: call {mode.code}, or a server with {mode.request}" for mode in modes]
    return [*lines, *filter(None, [warning_of(modes)])]
