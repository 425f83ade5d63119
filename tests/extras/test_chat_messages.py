"""What a chat template has no place for is refused, never dropped in silence."""

import pytest

from graphtrain.data.prepare.chat_templates import Template, find_template
from graphtrain.data.prepare.conversations import read_conversations
from graphtrain.data.tokenizers.byte import ByteTokenizer
from graphtrain.run.serving.http.errors import ApiError
from graphtrain.run.serving.http.messages import check_fields

USER = {"role": "user", "content": "a"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
RESULT = {"role": "tool", "content": "1", "tool_call_id": "x"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}"
    "{% if m.get('tool_calls') %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
)


def check(template, messages, tools=None):
    record = {"messages": messages, "tools": tools}
    (conversation,) = read_conversations(record, "messages", "messages")
    check_fields(messages, conversation, template)


def built_in(name):
    return find_template(name, ByteTokenizer())


@pytest.mark.parametrize("name", ["chatml", "llama2", "llama3", "qwen"])
def test_tools_need_a_template_with_a_place_for_them(name):
    with pytest.raises(ApiError, match=f"template {name} has no place for tools") as raised:
        check(built_in(name), [USER], TOOLS)
    assert (raised.value.status, raised.value.param) == (400, "tools")
    check(built_in(name), [USER], [])  # none to drop


def test_a_template_with_places_has_tools_calls_and_results():
    check(Template("t", WITH_TOOLS), [USER, CALL, RESULT, USER], TOOLS)


def test_a_field_has_a_place_if_it_is_mentioned_or_rendered_with_all_others():
    odd = [USER | {"tone": "warm"}]
    for text in ("{{ messages[0]['tone'] }}", "{{ messages | tojson }}", "{{ messages[0].tone }}"):
        check(Template("t", text), odd)
    for text in ("tone {# tone #}{{ messages[0].content }}", "{{ messages[0].content }}"):
        with pytest.raises(ApiError, match=r"messages\[0\]: the field 'tone' is unknown, or the"):
            check(Template("t", text), odd)


def test_a_field_that_is_null_is_not_given_and_the_id_of_a_result_needs_no_place():
    check(built_in("chatml"), [USER | {"name": None, "refusal": None}, RESULT])
    with pytest.raises(ApiError, match="'tool_calls'"):
        check(built_in("chatml"), [USER, CALL])
