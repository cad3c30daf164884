"""Whole histories of a client become the growing threads of an episode."""

from __future__ import annotations

from typing import Any

from flotilla_environment.gateway.histories import MOST_THREADS, Histories, Place

SYSTEM = {"role": "system", "content": "Be brief."}
ASKS = {"role": "user", "content": "What is 6 x 7?"}
CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "000001000", "name": "product", "arguments": '{"a": 6, "b": 7}'}],
}
RESULT = {"role": "tool", "content": "42", "tool_call_id": "000001000"}
SAYS = {"role": "assistant", "content": "It is 42."}
THANKS = {"role": "user", "content": "Thanks. And 6 x 8?"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_a_history_that_goes_on_is_told_what_is_new_alone() -> None:
    histories = Histories()
    assert histories.hear([SYSTEM, ASKS]) == Place("", (SYSTEM, ASKS), False)
    histories.say(CALLS)
    assert histories.hear([SYSTEM, ASKS, CALLS, RESULT]) == Place("", (RESULT,), False)
    histories.say(SAYS)
    assert histories.hear([SYSTEM, ASKS, CALLS, RESULT, SAYS, THANKS]) == Place("", (THANKS,), False)


def test_a_call_that_the_client_spells_in_another_way_is_the_same_call() -> None:
    histories = Histories()
    histories.hear([ASKS])
    histories.say(CALLS)
    (call,) = CALLS["tool_calls"]
    again = CALLS | {"content": None, "tool_calls": [call | {"arguments": '{"b":7,"a":6}'}]}
    assert histories.hear([ASKS, again, RESULT]) == Place("", (RESULT,), False)
    other = CALLS | {"tool_calls": [call | {"arguments": '{"a": 6, "b": 8}'}]}
    assert histories.hear([ASKS, other, RESULT]) == Place("2", (ASKS, other, RESULT), False)


def test_a_sub_agent_has_a_thread_of_its_own_and_the_first_one_goes_on_after_it() -> None:
    histories = Histories()
    histories.hear([SYSTEM, ASKS])
    histories.say(says("I ask another."))
    sub = [SYSTEM, user("Multiply 6 by 7.")]
    assert histories.hear(sub) == Place("2", tuple(sub), False)
    histories.say(SAYS)
    main = [SYSTEM, ASKS, says("I ask another."), user("It said 42.")]
    assert histories.hear(main) == Place("", (main[-1],), False)
    histories.say(SAYS)
    assert histories.hear([*sub, SAYS, THANKS]) == Place("2", (THANKS,), False)


def test_a_history_that_was_shortened_is_rewritten_in_its_thread() -> None:
    histories = Histories()
    histories.hear([SYSTEM, ASKS])
    histories.say(CALLS)
    histories.hear([SYSTEM, ASKS, CALLS, RESULT])
    histories.say(SAYS)
    short = [SYSTEM, user("In short: we multiplied."), SAYS, THANKS]
    assert histories.hear(short) == Place("", tuple(short), True)
    histories.say(says("48"))
    assert histories.hear([*short, says("48"), user("Well.")]) == Place("", (user("Well."),), False)


def test_a_turn_that_a_client_knows_in_part_is_told_again_as_it_was_written() -> None:
    histories = Histories()
    heard, own = says("Thought: multiply."), says("Thought: multiply.\nObservation:")
    histories.hear([SYSTEM, ASKS])
    histories.say(heard, own)
    assert histories.hear([SYSTEM, ASKS, heard, THANKS]) == Place("", (THANKS,), False)
    histories.say(SAYS)
    short = [user("In short."), heard, user("Well?")]
    assert histories.hear(short) == Place("", (user("In short."), own, user("Well?")), True)


def test_a_history_whose_answer_the_client_changed_has_a_thread_of_its_own() -> None:
    histories = Histories()
    histories.hear([ASKS])
    histories.say(SAYS)
    changed = [ASKS, says("42"), THANKS]
    assert histories.hear(changed) == Place("2", tuple(changed), False)


def test_branches_of_one_history_each_go_on_in_a_thread_of_their_own() -> None:
    histories = Histories()
    histories.hear([SYSTEM, ASKS])
    histories.say(SAYS)
    branches = [[SYSTEM, ASKS, SAYS, user(f"Way {number}?")] for number in range(3)]
    for number, branch in enumerate(branches):
        goes_on = Place("", (branch[-1],), False)
        parts = Place(str(number + 1), tuple(branch), False)
        assert histories.hear(branch) == (parts if number else goes_on)
        histories.say(says(f"way {number}"))
    for turn in range(2):
        for number, branch in enumerate(branches):
            branch += [says(f"way {number}" if not turn else "on"), user(f"And {turn}?")]
            assert histories.hear(branch) == Place(str(number + 1) if number else "", (branch[-1],), False)
            histories.say(says("on"))


def test_sub_agents_with_the_same_instructions_and_first_message_do_not_rewrite_each_other() -> None:
    histories = Histories()
    tasks = [[SYSTEM, ASKS, user(f"Part {number}.")] for number in range(2)]
    for number, task in enumerate(tasks):
        assert histories.hear(task) == Place("2" if number else "", tuple(task), False)
        histories.say(SAYS)
    for number, task in enumerate(tasks):
        assert histories.hear([*task, SAYS, THANKS]) == Place("2" if number else "", (THANKS,), False)
        histories.say(SAYS)


def test_several_samples_of_one_history_are_threads_that_each_go_on() -> None:
    histories = Histories()
    for number in range(3):
        place = histories.hear([SYSTEM, ASKS])
        assert (place.thread, place.afresh, place.messages) == (
            "" if not number else str(number + 1),
            False,
            (SYSTEM, ASKS),
        )
        histories.say(says(str(number)))
    for number in (1, 0, 2):
        place = histories.hear([SYSTEM, ASKS, says(str(number)), THANKS])
        assert place == Place("" if not number else str(number + 1), (THANKS,), False)
        histories.say(SAYS)


def test_the_number_of_threads_is_bounded() -> None:
    histories = Histories()
    for number in range(MOST_THREADS):
        assert not histories.hear([user(str(number))]).afresh
        histories.say(SAYS)
    assert histories.hear([user("more")]) == Place("", (user("more"),), True), "the oldest is rewritten"
    histories.say(SAYS)
    assert histories.hear([user("still more")]) == Place("2", (user("still more"),), True)
    assert histories.hear([user("5"), SAYS, THANKS]) == Place("6", (THANKS,), False)
