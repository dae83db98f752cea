"""Chat templates render what model authors expect, refuse with their words, and end."""

from typing import Any

import pytest

from outrider.core.errors import InputError, PromptError
from outrider.models.chat import ChatTemplate
from vocabularies import TableVocabulary, Token, bytes_and

PLAIN = """\
{% for message in messages %}
    {% if loop.first %}
{{ bos_token }}{% endif %}
<{{ message.role }}>{{ message.content }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}
<assistant>{% endif %}"""

NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('No system role here.') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}{% endfor %}"
)

USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "Yes?"}


def template(source: str, bos: str = "<s>", eos: str = "</s>") -> ChatTemplate:
    return ChatTemplate(source, bos=bos, eos=eos)


def rendered(source: str, **given: Any) -> str:
    return template(source).render([USER], **given)


def test_blocks_leave_no_blanks_and_special_tokens_are_named() -> None:
    chat = template(PLAIN)
    assert chat.render([SYSTEM, USER]) == "<s><system>Be brief.</s>\n<user>Hi</s>\n<assistant>"
    assert chat.render([USER], add_generation_prompt=False) == "<s><user>Hi</s>\n"


def test_content_is_text_and_never_a_template() -> None:
    said = {"role": "user", "content": "{{ 1 + 1 }}<&"}
    assert template("{{ messages[0].content }}").render([said]) == "{{ 1 + 1 }}<&"


def test_json_is_not_escaped_for_html() -> None:
    written = rendered("{{ tools[0] | tojson }}", tools=[{"name": "f", "about": "é < 'x' & y"}])
    assert written == '{"name": "f", "about": "é < \'x\' & y"}'
    assert rendered("{{ tools | tojson(indent=1) }}", tools=[{"a": 1}]) == '[\n {\n  "a": 1\n }\n]'


@pytest.mark.parametrize("tools", [None, []])
def test_no_tools_are_none(tools: list[dict[str, Any]] | None) -> None:
    assert rendered("{{ 'some' if tools is not none else 'none' }}", tools=tools) == "none"


def test_the_usual_helpers_are_there() -> None:
    assert rendered("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert rendered("{{ strftime_now('%Y') | length }}") == "4"
    assert rendered("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "Hi"
    assert rendered("{{ 'on' if thinking else 'off' }}", thinking=True) == "on"
    assert rendered("{{ 1 ~ 'a' ~ none }}{{ 2 * 3 + 2 ** 2 }}{{ 'ab' * 2 + 'c' }}") == "1aNone10ababc"


def test_the_templates_own_complaint_is_the_reason() -> None:
    with pytest.raises(InputError, match=r"refuses the conversation: Roles must alternate\. "):
        template(NO_SYSTEM).render([USER, USER])


def test_a_system_message_goes_into_the_first_user_message_where_there_is_no_such_role() -> None:
    messages = [dict(SYSTEM), dict(USER), dict(ANSWER)]
    assert template(NO_SYSTEM).render(messages) == "[user]Be brief.\n\nHi[assistant]Yes?"
    assert messages == [SYSTEM, USER, ANSWER], "the caller's are left alone"
    assert template(NO_SYSTEM).render([SYSTEM]) == "[user]Be brief."
    silent = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    assert template(silent).render([SYSTEM, USER]) == "[user]Be brief.\n\nHi"


@pytest.mark.parametrize("messages", [[], [{"content": "Hi"}], [USER, {"role": 3}]])
def test_messages_without_a_role_are_refused(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(PromptError):
        template(PLAIN).render(messages)


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ 'a' ", "{% nonsense %}", "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"]
)
def test_a_template_that_does_not_compile_is_an_input_error(source: str) -> None:
    with pytest.raises(InputError, match="does not compile"):
        template(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[9].content.x }}",
        "{% include 'passwords' %}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        # without end or measure
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(99999) %}{{ 'abcdefgh' * 1000 }}{% endfor %}",
        "{{ range(10 ** 12) | list }}",
    ],
)
def test_what_the_sandbox_refuses_or_stops_is_an_input_error(source: str) -> None:
    with pytest.raises(InputError, match="refuses the conversation"):
        rendered(source)


def test_a_stopped_template_can_be_used_again() -> None:
    chat = template("{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}ok")
    with pytest.raises(InputError):
        chat.render([USER], n=999)
    assert chat.render([USER], n=99) == chat.render([USER], n=99) == "ok"


def test_a_long_conversation_is_no_endless_one() -> None:
    messages = [USER, ANSWER] * 5000
    assert template(PLAIN).render(messages).count("<user>Hi") == 5000


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("writes", [True, False])
def test_there_is_one_start_token_if_anyone_wants_one(adds: bool, writes: bool) -> None:
    tokens = [*bytes_and(), Token(b"<s>", control=True)]
    vocabulary = TableVocabulary(tokens, bos=256 if adds else None)
    rendered = "<s>Hi" if writes else "Hi"
    assert template(PLAIN).tokenize(rendered, vocabulary) == [256] * (adds or writes) + [*b"Hi"]


def test_a_tokenizer_that_closes_texts_does_not_close_the_prompt() -> None:
    class Closing(TableVocabulary):
        def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
            out = super().tokenize(text, add_special=add_special, parse_special=parse_special)
            return [*out, 257] if add_special else out

    vocabulary = Closing(
        [*bytes_and(), Token(b"<s>", control=True), Token(b"</s>", control=True, end=True)], bos=256
    )
    assert template(PLAIN).tokenize("Hi", vocabulary) == [256, *b"Hi"]
