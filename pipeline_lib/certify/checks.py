"""The checks of a certificate: each compares what a server answers with the reference.

A check that a server gives no means for is `not checked`: it never counts as the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

from tokenizers import Tokenizer

from pipeline_lib.certify.questions import Kind
from pipeline_lib.certify.reference import BaseReference, Expected
from pipeline_lib.certify.server import ChatAnswer, NotOffered, Server
from pipeline_lib.certify.tolerances import Tolerance
from pipeline_lib.core.text import cut, one_line
from pipeline_lib.core.units import count
from pipeline_lib.data.conversations import ENDS_THINKING, OPENS_THINKING

_TEXT_CHARS = 60


class CheckVerdict(StrEnum):
    """What became of a check."""

    SAME = "same"
    DIFFERS = "differs"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Check:
    """A check: by which means of the server, what was found, and the likely cause if it differs."""

    name: str
    verdict: CheckVerdict
    by: str
    found: str
    cause: str = ""


def not_checked(name: str, reason: str) -> Check:
    """Return the check `name` that was not possible, and why."""
    return Check(name, CheckVerdict.NOT_CHECKED, "-", reason)


@dataclass(frozen=True)
class Served:
    """A question with what the server answered, or why it did not."""

    expected: Expected
    answer: ChatAnswer | None
    refusal: str = ""


def ask(server: Server, expected: Expected, max_tokens: int) -> Served:
    """Ask `server` the question. Raises ServerError if it cannot be reached."""
    try:
        return Served(expected, server.chat(expected.question, max_tokens))
    except NotOffered as error:
        return Served(expected, None, str(error))


# The prompt.


def check_tokenizer(server: Server, expected: Sequence[Expected], tokenizer: Tokenizer) -> Check:
    """Compare the token ids of the prompts' texts."""
    name = "tokenizer"
    for each in expected:
        try:
            found = server.token_ids(each.question.prompt)
        except NotOffered as error:
            return not_checked(name, str(error))
        if found != each.prompt:
            text = _ids_apart(each.prompt, found, tokenizer)
            cause = "another tokenizer, or a conversion that lost special tokens"
            return Check(name, CheckVerdict.DIFFERS, "/tokenize", text, cause)
    found_text = f"the ids of {count(len(expected), 'prompts')}"
    return Check(name, CheckVerdict.SAME, "/tokenize", found_text)


@dataclass(frozen=True)
class _Rendering:
    """How a prompt was compared: `difference` is empty if it is the same."""

    by: str
    difference: str
    is_other_mode: bool = False


def check_template(
    server: Server, kind: Kind, served: Sequence[Served], tokenizer: Tokenizer
) -> Check:
    """Compare the prompts that the server makes of the conversations of a `kind`."""
    name = f"template, {kind}"
    asked = [each for each in served if each.expected.question.kind == kind]
    if not asked:
        return not_checked(name, "the folder's template renders no such conversation")
    means: list[str] = []
    for each in asked:
        try:
            found = _rendering(server, each, asked, tokenizer)
        except NotOffered as error:
            return not_checked(name, str(error))
        if found.difference:
            cause = (
                "another chat template: serve the folder with its own chat_template.jinja, and "
                "set no other"
            )
            if found.is_other_mode:
                cause = "the server does not give chat_template_kwargs to the template"
            return Check(name, CheckVerdict.DIFFERS, found.by, found.difference, cause)
        means.append(found.by)
    by = ", ".join(dict.fromkeys(means))
    return Check(name, CheckVerdict.SAME, by, count(len(asked), "prompts"))


def _rendering(
    server: Server, served: Served, others: Sequence[Served], tokenizer: Tokenizer
) -> _Rendering:
    """Compare a prompt by the best means that the server has. Raises NotOffered without any."""
    expected = served.expected
    question = expected.question
    try:
        ids = server.prompt_ids(question)
    except NotOffered:
        pass
    else:
        difference = _ids_apart(expected.prompt, ids, tokenizer)
        is_other = any(other.expected.prompt == ids for other in others)
        return _Rendering("/tokenize", difference, is_other)
    try:
        text = server.prompt_text(question)
    except NotOffered:
        pass
    else:
        difference = _texts_apart(question.prompt, text)
        is_other = any(other.expected.question.prompt == text for other in others)
        return _Rendering("/apply-template", difference, is_other)
    if served.answer is None:
        raise NotOffered(served.refusal)
    number = served.answer.prompt_tokens
    if number is None:
        raise NotOffered("neither /tokenize nor /apply-template nor usage.prompt_tokens")
    by = "usage.prompt_tokens, only the number of tokens"
    wanted = len(expected.prompt)
    if number == wanted:
        return _Rendering(by, "")
    is_other = any(len(other.expected.prompt) == number for other in others)
    return _Rendering(by, f"a prompt of {number} tokens, expected {wanted}", is_other)


def _ids_apart(expected: Sequence[int], found: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return where the prompts begin to differ; the empty string if they are equal."""
    if list(expected) == list(found):
        return ""
    place = _first_difference(expected, found)
    wanted = _quoted(tokenizer.decode(list(expected[place : place + 8]), skip_special_tokens=False))
    there = _quoted(tokenizer.decode(list(found[place : place + 8]), skip_special_tokens=False))
    return f"from token {place + 1} of the prompt {there}, expected {wanted}"


def _texts_apart(expected: str, found: str) -> str:
    if expected == found:
        return ""
    place = _first_difference(expected, found)
    there = _quoted(found[place:])
    return f"from character {place + 1} of the prompt {there}, expected {_quoted(expected[place:])}"


def _first_difference(expected: Sequence[object], found: Sequence[object]) -> int:
    for place, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            return place
    return min(len(expected), len(found))


def _quoted(text: str) -> str:
    return repr(cut(one_line(text), _TEXT_CHARS)) if text else "nothing"


# The answers.

ANSWERS = "greedy answers"
END = "end of the turn"
GIVEN_NATS = "log-probabilities of given answers"
NOT_THE_BASE = "not the base model"


def check_answers(served: Sequence[Served], tokenizer: Tokenizer, tolerance: Tolerance) -> Check:
    """Compare greedy answers, up to a near tie of the reference's two likeliest tokens."""
    name = ANSWERS
    whole, ties, left_out, tokens = 0, 0, 0, 0
    for each in served:
        if each.answer is None or each.answer.has_calls:
            left_out += 1
            continue
        place = first_other_token(each.expected, each.answer, tokenizer)
        if place is None:
            whole += 1
            tokens += len(each.expected.answer)
        elif each.expected.leads[place] <= tolerance.tie_nats:
            ties += 1
            tokens += place
        else:
            return Check(name, CheckVerdict.DIFFERS, "chat", _answers_apart(each, place, tokenizer))
    if not tokens:
        return not_checked(name, _why_unanswered(served))
    found = f"{whole} of {count(len(served), 'answers')} whole"
    found += f", {ties} up to a near tie" if ties else ""
    found += f", {left_out} refused or parsed as calls and not compared" if left_out else ""
    return Check(name, CheckVerdict.SAME, "chat", found)


def _why_unanswered(served: Sequence[Served]) -> str:
    for each in served:
        if each.refusal:
            return each.refusal
    return "no answer that can be compared"


def _answers_apart(served: Served, place: int, tokenizer: Tokenizer) -> str:
    answer = served.answer
    there = answer.text if answer else ""
    wanted = tokenizer.decode(served.expected.answer, skip_special_tokens=True)
    return (
        f"from token {place + 1} of the answer to {_quoted(_asked(served))}: "
        f"{_quoted(there)}, expected {_quoted(wanted)}"
    )


def _asked(served: Served) -> str:
    users = [
        message["content"]
        for message in served.expected.question.messages
        if message["role"] == "user"
    ]
    return str(users[-1])


def first_other_token(expected: Expected, answer: ChatAnswer, tokenizer: Tokenizer) -> int | None:
    """Return the place of the first token of `expected` that `answer` does not have, or None.

    An answer that goes on behind an expected end is the same up to there. Without the tags of a
    thinking block and white space, if the server took the block out of the text.
    """
    plain = _plain_as(answer)
    found = plain(answer.text)
    whole = plain(tokenizer.decode(expected.answer, skip_special_tokens=True))
    if found == whole or (expected.has_ended and found.startswith(whole)):
        return None
    return _first_missing(expected.answer, found, plain, tokenizer)


def _plain_as(answer: ChatAnswer) -> Callable[[str], str]:
    """Return what leaves of a text only that in which it can be compared with `answer`."""
    return str.strip if answer.reasoning is None else _squeezed


def _first_missing(
    tokens: Sequence[int], found: str, plain: Callable[[str], str], tokenizer: Tokenizer
) -> int:
    for length in range(1, len(tokens) + 1):
        text = tokenizer.decode(list(tokens[:length]), skip_special_tokens=True)
        if not found.startswith(plain(text.rstrip("\ufffd"))):  # of an incomplete character
            return length - 1
    return len(tokens) - 1


def _squeezed(text: str) -> str:
    for tag in (OPENS_THINKING, ENDS_THINKING):
        text = text.replace(tag, "")
    return "".join(text.split())


def check_end(served: Sequence[Served], tokenizer: Tokenizer) -> Check:
    """Check that answers stop where the reference ends its turn, without special tokens."""
    name = END
    special = [
        token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
    ]
    ended = 0
    for each in served:
        answer = each.answer
        if answer is None or answer.has_calls:
            continue
        if left := [token for token in special if token in answer.content]:
            found = f"{left[0]} in the text of an answer"
            cause = "the server does not know the special tokens, and may not stop at them"
            return Check(name, CheckVerdict.DIFFERS, "chat", found, cause)
        place = first_other_token(each.expected, answer, tokenizer)
        if not each.expected.has_ended or place is not None:
            continue
        ended += 1
        if answer.finish_reason != "stop" or _goes_on(each.expected, answer, tokenizer):
            found = (
                f"the answer to {_quoted(_asked(each))} goes on behind its end (finish_reason "
                f"{one_line(answer.finish_reason) or 'missing'})"
            )
            cause = "no stop token: serve the folder's generation_config.json and tokenizer files"
            return Check(name, CheckVerdict.DIFFERS, "finish_reason", found, cause)
    if not ended:
        reason = "the model ends none of its answers; allow more --max-new-tokens"
        if any(each.expected.has_ended for each in served):
            reason = "no answer is the model's up to its end"
        return not_checked(name, reason)
    return Check(name, CheckVerdict.SAME, "finish_reason", count(ended, "answers"))


def _goes_on(expected: Expected, answer: ChatAnswer, tokenizer: Tokenizer) -> bool:
    plain = _plain_as(answer)
    whole = tokenizer.decode(expected.answer, skip_special_tokens=True)
    return plain(answer.text) != plain(whole)


# Log-probabilities.


def check_own_nats(served: Sequence[Served], tokenizer: Tokenizer, tolerance: Tolerance) -> Check:
    """Compare the log-probabilities that the server gives of its own answers' tokens."""
    name = "log-probabilities of its answers"
    differences: list[float] = []
    is_given = False
    for each in served:
        if each.answer is None or not each.answer.tokens:
            continue
        is_given = True
        differences += _own_differences(each.expected, each.answer, tokenizer)
    if not is_given:
        return not_checked(name, "chat completions without logprobs")
    if not differences:
        return not_checked(name, "the answers differ from their first token on")
    return _judged(name, "logprobs of chat", differences, tolerance)


def _own_differences(expected: Expected, answer: ChatAnswer, tokenizer: Tokenizer) -> list[float]:
    """Return the differences of the tokens up to the first that is another one."""
    found = []
    for token, nats, given in zip(expected.answer, expected.nats, answer.tokens, strict=False):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if given.text != text and "\ufffd" not in text:  # a part of a character has no text
            break
        found.append(abs(given.nats - nats))
    return found


GivenNats = list[list[float | None]]


def given_nats(server: Server, expected: Sequence[Expected]) -> GivenNats | str:
    """Return the server's log-probabilities of the reference's answers, or why there are none."""
    found = []
    for each in expected:
        try:
            nats = server.nats_of(each.prompt + each.answer)
        except NotOffered as error:
            return str(error)
        found.append(nats[len(each.prompt) :])
    return found


def check_given_nats(
    given: GivenNats | str, expected: Sequence[Expected], tolerance: Tolerance
) -> Check:
    """Compare the log-probabilities of the reference's answers, which the server was given."""
    name = GIVEN_NATS
    if isinstance(given, str):
        return not_checked(name, given)
    differences = _differences(given, [each.nats for each in expected])
    if not differences:
        return not_checked(name, "/completions without the log-probabilities of the prompt")
    return _judged(name, "/completions", differences, tolerance)


def _differences(given: GivenNats, expected: Sequence[Sequence[float]]) -> list[float]:
    found = []
    for theirs, ours in zip(given, expected, strict=True):
        for one, other in zip(theirs, ours, strict=True):
            if one is not None:
                found.append(abs(one - other))
    return found


def _judged(name: str, by: str, differences: list[float], tolerance: Tolerance) -> Check:
    mean = fmean(differences)
    found = (
        f"{mean:.3f} nats a token apart, tolerance {tolerance.mean_nats:g} "
        f"({count(len(differences), 'tokens')}, at most {max(differences):.3f})"
    )
    is_near = mean <= tolerance.mean_nats  # false for NaN
    return Check(name, CheckVerdict.SAME if is_near else CheckVerdict.DIFFERS, by, found)


# The base model in place of the tuned one.


def check_base(
    base: BaseReference | str,
    served: Sequence[Served],
    given: GivenNats | str,
    tokenizer: Tokenizer,
) -> Check:
    """Check that what is served is nearer to the tuned model than to its base.

    It is by log-probabilities if the server gives them, else by whole answers.
    """
    name = NOT_THE_BASE
    if isinstance(base, str):
        return not_checked(name, base)
    tuned = [each.expected.nats for each in served]
    if not isinstance(given, str) and _differences(given, tuned):
        return _base_by_nats(name, base, tuned, given)
    return _base_by_answers(name, base, served, tokenizer)


BASE_CAUSE = "the base model is served, or an adapter is not applied"
_CLEARLY = 2.0  # times as near, or rounding could decide where a short training changed little


def _base_by_nats(
    name: str, base: BaseReference, tuned: list[list[float]], given: GivenNats
) -> Check:
    from_tuned = fmean(_differences(given, tuned))
    from_base = fmean(_differences(given, base.nats))
    found = f"{from_tuned:.3f} nats a token from the tuned model, {from_base:.3f} from the base"
    if from_base > _CLEARLY * from_tuned:
        return Check(name, CheckVerdict.SAME, "/completions", found)
    if from_tuned > _CLEARLY * from_base:
        return Check(name, CheckVerdict.DIFFERS, "/completions", found, BASE_CAUSE)
    return not_checked(name, f"{found}: about as near to both")


def _base_by_answers(
    name: str, base: BaseReference, served: Sequence[Served], tokenizer: Tokenizer
) -> Check:
    as_tuned, as_base = 0, 0
    for each, of_base in zip(served, base.answers, strict=True):
        if each.answer is None or each.expected.answer == of_base.answer:
            continue
        as_tuned += first_other_token(each.expected, each.answer, tokenizer) is None
        as_base += first_other_token(of_base, each.answer, tokenizer) is None
    found = f"{count(as_tuned, 'answers')} as the tuned model's, {as_base} as the base's"
    if as_base > as_tuned:
        return Check(name, CheckVerdict.DIFFERS, "chat", found, BASE_CAUSE)
    if as_tuned > as_base:
        return Check(name, CheckVerdict.SAME, "chat", found)
    return not_checked(name, "no answer tells the tuned model from its base")
