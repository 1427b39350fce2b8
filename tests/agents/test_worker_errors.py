"""What is told of an error that a user's code raised?"""

from __future__ import annotations

import pytest

from callboard.agents.host.worker_process import MAX_TRACEBACK_CHARACTERS, failed, format_error, told_traceback
from callboard.scheduler.handlers import workers


class Mute(Exception):
    """Its text can't be had."""

    def __str__(self) -> str:
        """Raise."""
        raise RuntimeError("no text")


def noted() -> ValueError:
    error = ValueError("one")
    error.add_note("a note\n  of two lines")
    return error


def told(error: BaseException) -> str:
    with pytest.raises(type(error)) as raised:
        raise error
    return told_traceback(format_error(raised.value), str)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("one"), "ValueError: one"),
        (ValueError(), "ValueError"),
        (ValueError("one\ntwo\n\nthree"), "ValueError: one"),
        (
            ValueError("2 errors for Model\nx\n  should be a number\n    see the guide"),
            "ValueError: 2 errors for Model",
        ),
        (ValueError("one\n  two\nthree"), "ValueError: one"),
        (noted(), "ValueError: one"),
        (SyntaxError("no syntax", ("a.py", 1, 1, "def x(:", 1, 1)), "SyntaxError: no syntax"),
        (ExceptionGroup("tasks", [ValueError("a"), KeyError("b")]), "ExceptionGroup: tasks (2 sub-exceptions)"),
        (ValueError("x" * 10**6), "ValueError: " + "x" * 188),
        (ValueError("\n".join(map(str, range(10**5)))), "ValueError: 0"),
        (Mute(), f"{__name__}.Mute: <exception str() failed>"),
    ],
)
def test_the_reason_of_a_job_is_what_was_raised_however_the_error_is_written(error: Exception, said: str) -> None:
    text = told(error)
    assert workers._error_of(text) == said
    assert len(text) < MAX_TRACEBACK_CHARACTERS + 2_000


def test_a_traceback_that_ends_with_what_was_raised_stays_as_it_is() -> None:
    assert "In short" not in told(ValueError("one"))
    assert told(ExceptionGroup("tasks", [ValueError("a")])).endswith(
        "  In short:\nExceptionGroup: tasks (1 sub-exception)\n"
    )


def test_an_error_that_can_not_say_what_it_is_fails_its_worker_by_its_own_name() -> None:
    assert failed("CONSTRUCTOR", Mute())["message"] == "Mute, whose text can't be had: its __str__ raises"
