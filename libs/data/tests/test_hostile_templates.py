"""Chat templates of strangers: each renders, or ends in one clear error, in bounded memory and time."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from flotilla_core.bounded_process import BoundedProcess, Bounds
from flotilla_core.errors import FailedPrecondition, FlotillaError, InvalidConfig
from flotilla_data import chat_template
from flotilla_data.chat_template import ChatTemplate, Conversation
from flotilla_testing.children import children_that_run

MESSAGES = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
RENDER = "flotilla_data.template_child:render"
NESTED = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3


@pytest.fixture(scope="module", autouse=True)
def short_bounds() -> Iterator[None]:
    """Let endless templates end soon; everything else is as it is for users."""
    bounds = replace(Bounds(chat_template.MEMORY_BYTES, 1.0), answer_bytes=chat_template.MOST_ANSWER_BYTES)
    with BoundedProcess(RENDER, bounds) as child, pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template, "_CHILD", child)
        yield


TEMPLATES: dict[str, tuple[str, str]] = {
    # What passes the bounds.
    "nested loops": (NESTED, "more than 1 s of a processor"),
    "power": ("{{ 10 ** (10 ** 9) }}", "more than 1 s of a processor|memory"),
    "power of a variable": ("{% set x = 9 %}{{ x ** (x ** x) }}", "more than 1 s of a processor|memory"),
    "doubling": (
        "{% set n = namespace(t='xxxxxxxx') %}{% for i in range(40) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
        "memory|more than 1 s of a processor",
    ),
    "long text": ("{{ 'x' * 100000000 }}", "larger than 96 MiB|processor"),
    "text of everything": ("{{ 'x' * 10 ** 12 }}", "memory"),
    "list of everything": ("{{ ([0] * 10 ** 10) | length }}", "memory"),
    "wide format": ("{{ '%*d' % (10 ** 9, 1) }}", "memory|larger than|processor"),
    "wide format specification": ("{{ '{:>9999999999}'.format(1) }}", "memory|Too many decimal"),
    "centred": ("{{ 'x' | center(10 ** 10) }}", "memory"),
    "indented": ("{{ ('x\\n' * 1000000) | indent(10000) }}", "memory|processor"),
    "replaced": ("{{ ('x' * 100000) | replace('x', 'y' * 100000) }}", "memory"),
    "joined": ("{{ range(99999) | join('x' * 1000000) }}", "memory"),
    "sorted products": ("{{ ('x' * 100000) | batch(1) | list | map('list') | list * 999999 }}", "memory|processor"),
    "called in circles": ("{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{% for i in range(9) %}{{ a() }}"
        "{% endfor %}{% endmacro %}{{ a() }}", "recursion|undefined"),
    # What the sandbox and the language refuse.
    "range": ("{% for i in range(10 ** 9) %}{{ i }}{% endfor %}", "OverflowError.*[Rr]ange too big"),
    "recursion": ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "RecursionError"),
    "recursive loop": ("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "RecursionError"),
    "itself": ("{{ self.a() }}{% block a %}{{ self.a() }}{% endblock %}", "RecursionError"),
    "classes": ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "class by filter": ("{{ (messages | attr('__class__')).__base__ }}", "unsafe|undefined"),
    "globals of a function": ("{{ raise_exception.__globals__.json }}", "unsafe"),
    "globals of a macro": ("{% macro a() %}{% endmacro %}{{ a.__init__.__globals__.os }}", "unsafe"),
    "format of an attribute": ("{{ '{0.__class__.__mro__}'.format(messages) }}", "unsafe"),
    "format of a mapping": ("{{ '{a.__class__.__mro__}'.format_map({'a': 1}) }}", "unsafe"),
    "cycler": ("{{ cycler.__init__.__globals__ }}", "unsafe"),
    "changed messages": ("{{ messages.append(1) }}", "unsafe|not safely callable"),
    "changed message": ("{{ messages[0].update({'role': 'system'}) }}", "unsafe|not safely callable"),
    "include": ("{% include '/etc/passwd' %}", "no loader"),
    "import": ("{% import 'os' as os %}{{ os }}", "no loader"),
    "extends": ("{% extends 'base' %}", "no loader"),
    "exception": ("{{ raise_exception('no system role') }}", "no system role"),
    "long exception": ("{{ raise_exception('x' * 1000000) }}", "^.{10,3000}$"),
    "exception without text": ("{{ raise_exception('') }}", "refuses the messages"),
    "division": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "division of a variable": ("{{ messages | length // (messages | length - 2) }}", "ZeroDivisionError"),
    "infinite number": ("{{ (10 ** 400) / 3 }}", "OverflowError"),
    "half of a pair": ("{{ '\\ud800' }}", "half of a surrogate pair"),
    "unknown filter": ("{{ messages | nothing }}", "cannot be read.*nothing"),
    "unknown test": ("{{ messages is nothing }}", "cannot be read.*nothing"),
    "open tag": ("{% for m in messages %}", "cannot be read"),
    "open expression": ("{{ messages", "cannot be read"),
    "no template": ("{% %}", "cannot be read"),
    "deep parentheses": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be read|bounds"),
    "deep blocks": ("{% if 1 %}" * 500 + "{% endif %}" * 500, "cannot be read|bounds"),
    "deep list": ("{{ " + "[" * 3000 + "]" * 3000 + " }}", "cannot be read|bounds"),
    "undefined": ("{{ nobody.there }}", "undefined"),
    "wrong index": ("{{ messages[9].content }}", "no element 9|undefined"),
    "wrong types": ("{{ messages + 1 }}", "TypeError"),
    "number of text": ("{{ 'a' * 'b' }}", "TypeError"),
    "time": ("{{ strftime_now(7) }}", "TypeError"),
    "keys in JSON": ("{{ {(1, 2): 3} | tojson }}", "TypeError"),
}  # fmt: skip


@pytest.mark.parametrize(("source", "told"), TEMPLATES.values(), ids=TEMPLATES.keys())
def test_template(source: str, told: str) -> None:
    with pytest.raises(FlotillaError) as refused:
        ChatTemplate(source, {}, where="the model").render(MESSAGES)
    text = str(refused.value)
    assert isinstance(refused.value, InvalidConfig | FailedPrecondition), text
    assert re.search(told, text), text
    assert "the model" in text and len(text) < 4000
    assert isinstance(refused.value, InvalidConfig) or refused.value.next_step
    # The next conversation has nothing of it.
    assert ChatTemplate("{{ messages[0].content }}", {}, where="").render(MESSAGES) == "1+1="
    for child in children_that_run(RENDER):
        assert child.rlimit(psutil.RLIMIT_AS)[0] == chat_template.MEMORY_BYTES


def test_templates_that_many_share_one_process() -> None:
    """Threads that render at once get their own texts, and start no further child."""
    found: dict[int, str] = {}
    ChatTemplate("x", {}, where="").render(MESSAGES)
    before = children_that_run(RENDER)

    def work(number: int) -> None:
        template = ChatTemplate(f"{{{{ messages[0].content }}}} {number}", {}, where="")
        for _ in range(20):
            found[number] = template.render([{"content": str(number)}])
            assert found[number] == f"{number} {number}"

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: f"{number} {number}" for number in range(8)}
    assert children_that_run(RENDER) == before


def test_the_conversation_that_passes_the_bounds_is_named() -> None:
    source = "{% if messages[0].content == '7' %}" + NESTED + "{% endif %}{{ messages[0].content }}"
    template = ChatTemplate(source, {}, where="the model")
    asked = [Conversation([{"content": str(n)}], where=f"train.jsonl, line {n}") for n in range(20)]
    with pytest.raises(FailedPrecondition, match=r"bounds \(train.jsonl, line 7; the model\)"):
        template.render_many(asked)
    assert template.render_many(asked[:7]) == [str(n) for n in range(7)]


def test_a_refused_conversation_leaves_the_others() -> None:
    template = ChatTemplate("{{ 6 // (messages | length) }}", {}, where="the model")
    texts = template.render_many(
        [Conversation([{}]), Conversation([], where="line 2"), Conversation([{}, {}])]
    )
    assert (texts[0], texts[2]) == ("6", "3")
    assert "line 2; the model" in str(texts[1])


def test_tools_and_the_begin_of_the_answer_reach_the_template() -> None:
    template = ChatTemplate(
        "{{ tools | tojson }}{{ add_generation_prompt }}{{ eos }}", {"eos": "<e>"}, where=""
    )
    assert template.render([], tools=[{"name": "ü"}], begin_answer=False) == '[{"name": "ü"}]False<e>'
    assert template.render([]) == "nullTrue<e>"
