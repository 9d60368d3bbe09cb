"""The thinking of an assistant's message: reasoning_content, or an initial `<think>` block.

It is in `reasoning_content`, or in one block at the start of the text. `conversations.check`
refuses rows with think tags anywhere else.
"""

import re
from collections.abc import Sequence

from pipeline_lib.data.conversations import OPENS_THINKING, Message

_BLOCK = re.compile(r"\s*<think>(.*?)</think>\n*", re.DOTALL)
_END = re.compile(r"</think>(?:\s*\n)?")
# The opening tag is optional, because the prompt may end with it.
_EMPTY_BLOCK = re.compile(r"(?:\s*<think>)?\s*</think>(?:\s*\n)?")


def thinking_of(message: Message) -> str:
    """Return the thinking of the assistant's `message`; the empty string if there is none."""
    if reasoning := message.get("reasoning_content"):
        return str(reasoning).strip()
    block = _BLOCK.match(message["content"])
    return block[1].strip() if block else ""


def thinking_modes(messages: Sequence[Message]) -> list[bool]:
    """Return for each message whether thinking is on for its question (the user message).

    A caller sets the thinking switch once for a question: it is on for all its tool-call steps if
    any of them thinks.
    """
    question = 0
    questions = []  # the number of each message's question
    thinking = set()
    for message in messages:
        if message["role"] == "user":
            question += 1
        questions.append(question)
        if message["role"] == "assistant" and thinking_of(message):
            thinking.add(question)
    return [question in thinking for question in questions]


def without_thinking(message: Message) -> Message:
    """Return `message` without an assistant's thinking, in reasoning_content or in its text."""
    if message["role"] != "assistant":
        return message
    kept = {key: value for key, value in message.items() if key != "reasoning_content"}
    if block := _BLOCK.match(message["content"]):
        kept["content"] = message["content"][block.end() :]
    return kept


_USER_TURN = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)


def last_question(prompt: str) -> str:
    """Return a rendered prompt's last user turn; the whole prompt for other templates."""
    turns = _USER_TURN.findall(prompt)
    return str(turns[-1]).strip() if turns else prompt


def opens_thinking(prompt: str) -> bool:
    """Return whether `prompt` ends within a thinking block, so that the model has to think."""
    return prompt.rstrip().endswith(OPENS_THINKING)


def with_thinking_apart(message: Message) -> Message:
    """Return `message` with the `<think>` block of an assistant's text as reasoning_content."""
    if message["role"] != "assistant":
        return message
    block = _BLOCK.match(message["content"])
    if block is None:
        return message
    rest = message["content"][block.end() :]
    return {**message, "reasoning_content": block[1].strip(), "content": rest}


def end_of_thinking(message: Message, rendered: str, start: int) -> int | None:
    """Return the index in `rendered` after `message`'s thinking from `start`, and line ends.

    Return 0 if `message` has no thinking and the template writes no empty block either, None if the
    end of the thinking cannot be determined.
    """
    thought = thinking_of(message)
    if not thought:
        block = _EMPTY_BLOCK.match(rendered, start)
        return block.end() if block else 0
    end = _END.search(rendered, start)
    if end is None or not rendered[start : end.start()].rstrip().endswith(thought):
        return None
    return end.end()
