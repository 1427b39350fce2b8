"""What `callboard store …` does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from callboard.cli.cluster.tokens import printed
from callboard.cli.options import wishes
from callboard.cli.show import consoles
from callboard.cli.show.exits import BAD_INPUT, CommandFailed
from callboard.cli.show.verb_guard import failing_in_words
from callboard.controller.journal.copying import Copied, Until, back_up_journal, copy_journal, restore_journal
from callboard.controller.journal.database import Where, check_url
from callboard.controller.journal.state_dir import KEY_NAME, StoreFailed
from callboard.model.faults import InvalidInput


def copy(source: str, target: str, *, key: Path | None) -> None:
    """Copies a journal that nobody uses."""
    with _in_words("Nothing was copied."):
        copied = copy_journal(_where("FROM", source), _where("TO", target), key=key)
    _show(copied, source, target)


def back_up(source: str, file: Path, *, key: Path | None) -> None:
    """Copies a journal into a file."""
    with _in_words("There is no backup."):
        copied = back_up_journal(_where("FROM", source), file, key=key)
    _show(copied, source, str(file))
    if not wishes.for_program and not wishes.quiet:
        consoles.stdout().print(
            f"{copied.key} opens the secret values in it. Keep it, and keep it apart.", soft_wrap=True
        )


def restore(file: Path, target: str, *, key: Path | None, until: str) -> None:
    """Puts a backup where no journal is."""
    with _in_words("Nothing was restored."):
        copied = restore_journal(file, _where("TO", target), key=key, until=_until(until) if until else None)
    _show(copied, str(file), target)


@contextmanager
def _in_words(what: str) -> Iterator[None]:
    with failing_in_words():
        try:
            yield
        except StoreFailed as error:
            raise CommandFailed(what, f"{error.path}: {error.why}.", error.remedy, BAD_INPUT) from error


def _where(name: str, text: str) -> Where:
    """A state directory or the URL of a database."""
    if "://" not in text:
        return Path(text)
    try:
        return check_url(text, from_command_line=True)
    except InvalidInput as error:
        remedy = "Write postgresql://ACCOUNT@HOST/DATABASE."
        raise CommandFailed(f"`{name}` is not clear.", f"{error.faults[0].message}.", remedy, BAD_INPUT) from error


def _until(text: str) -> Until:
    """A revision, or a time."""
    if text.isdecimal():
        return Until(revision=int(text))
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        why = f"{text!r} is neither a revision nor a time."
        remedy = "Write a number, or a time like 2026-01-31T08:00:00Z."
        raise CommandFailed("`--until` is not clear.", why, remedy, BAD_INPUT) from error
    return Until(at_ms=int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000))


def _show(copied: Copied, source: str, target: str) -> None:
    plain = {"revision": copied.revision, "rows": copied.rows, "key": str(copied.key)}
    if printed(plain) or wishes.quiet:
        return
    packages = copied.rows["package"]
    rows = sum(copied.rows.values()) - packages
    code = f" and {packages} packages of code" if packages else ""
    consoles.stdout().print(
        f"{target} holds what {source} held at revision {copied.revision}: {rows} rows{code}, read back and compared.",
        soft_wrap=True,
    )
    if "://" in target:
        consoles.stdout().print(
            f"Each controller of it needs {copied.key} as {KEY_NAME} in its state directory.", soft_wrap=True
        )
