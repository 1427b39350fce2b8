"""Does a worker keep the values of secret variables to itself (SE-04)? Also long ones, and those of several lines."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest

from callboard.agents.host.worker_host import WorkerHost
from callboard.agents.host.worker_process import MAX_MESSAGE_CHARACTERS, plain, told_message, told_traceback
from callboard.agents.host.worker_secrets import MASK, HidingStream, hidden, hiding

KEY = "-----BEGIN KEY-----\nMIIEvQIBADANBgkq hkiG9w0B\nAQEFAASC+/=\n-----END KEY-----\n"
SECRETS = ("to\"ken\\with'marks", KEY, "schlüssel-schloß", "a b&c=d/e", "tok-from-a-file\n")


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_is_masked_however_a_text_writes_it(secret: str) -> None:
    hide = hiding(["another", secret])
    forms = (secret, secret.strip(), repr(secret), ascii(secret), json.dumps(secret), json.dumps({"key": secret}))
    for told in (*forms, str(KeyError(secret)), f"first\n{secret}\nlast"):
        shown = hide(told)
        assert MASK in shown
        for line in secret.split("\n"):
            assert not line or line not in shown


def test_a_line_of_a_private_key_is_a_secret_by_itself() -> None:
    assert hiding([KEY])("could not read MIIEvQIBADANBgkq hkiG9w0B") == f"could not read {MASK}"


def test_texts_without_a_secret_stay_as_they_are_and_words_of_three_letters_are_none() -> None:
    hide = hiding(["abc", "", "x", "\n", "on\noff\n"])
    assert hide("abc turns x on\nand off") == "abc turns x on\nand off"


def test_a_long_secret_is_masked_before_a_text_is_cut() -> None:
    secret = "s3cret-" * 10_000
    hide = hiding([secret])
    assert told_traceback(f"RuntimeError: {secret}", hide) == f"RuntimeError: {MASK}"
    assert told_message("x" * (MAX_MESSAGE_CHARACTERS - 3) + secret, hide).endswith("x***")
    assert "s3cret" not in str(plain({"said": secret}, hide)) + str(plain({"said": object(), "and": secret}, hide))


def test_what_a_worker_says_of_its_progress_is_masked_and_short_and_two_long_ones_differ() -> None:
    hide = hiding(["hunter22"])
    assert plain({"hunter22": ["step hunter22", 5, None]}, hide) == {MASK: [f"step {MASK}", 5, None]}
    assert hidden(("hunter22", 1.5), hide) == [MASK, 1.5]
    one, other = (plain(["x" * 50_000, last], hide) for last in (1, 2))
    assert one != other
    assert max(len(str(one)), len(str(other))) < 2 * MAX_MESSAGE_CHARACTERS


def test_half_a_character_in_an_error_can_be_sent() -> None:
    assert told_message("no such file: \udcff", str).encode() == rb"no such file: \udcff"


async def test_what_a_class_prints_is_masked_from_its_first_line_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    host: Any = WorkerHost()
    host._hide_secrets(["hunter22", ""])
    assert sys.stdout.write("password: hunter22 {'key': 'hunter22'}\n") == 39
    sys.stderr.writelines(["hunter22\n", "done\n"])
    assert isinstance(sys.stdout, HidingStream)
    assert sys.stdout.getvalue() == out.getvalue() == f"password: {MASK} {{'key': '{MASK}'}}\n"
    assert err.getvalue() == f"{MASK}\ndone\n"


async def test_without_secrets_the_streams_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    host: Any = WorkerHost()
    host._hide_secrets([""])
    assert sys.stdout is out
