"""Every story under this folder, told again on the real scheduler: what it says must happen, to the letter.

``UPDATE_SCENARIOS=1`` writes down what happens instead; read the difference before you believe it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.scenarios.language import ScenarioError, command, duration_ms, node, parse, repeated, written
from tests.scenarios.stage import told

HERE = Path(__file__).parent
STORIES = sorted(HERE.glob("*.txt"))


@pytest.mark.parametrize("story", STORIES, ids=lambda path: path.stem)
def test_the_story_goes_as_it_is_written(story: Path) -> None:
    text = story.read_text()
    actual = told(text)
    if os.environ.get("UPDATE_SCENARIOS"):
        story.write_text(actual)
    assert actual == text or os.environ.get("UPDATE_SCENARIOS")


def test_there_are_stories_and_each_says_first_what_it_shows() -> None:
    assert len(STORIES) >= 20
    assert [story.stem for story in STORIES if not story.read_text().startswith("# ")] == []


def test_reading_and_writing_a_story_changes_nothing() -> None:
    for story in STORIES:
        assert written(parse(story.read_text())) == story.read_text()


def test_a_line_is_a_verb_words_and_options() -> None:
    found = command('submit a priority=1 x=2x(cpu=1,gpu=1) "some words"')
    assert (found.verb, found.words) == ("submit", ("a", "some words"))
    assert found.options == {"priority": "1", "x": "2x(cpu=1,gpu=1)"}
    assert command("nodes n1:cpu=4,gpu=1@zone=b").words == ("n1:cpu=4,gpu=1@zone=b",)
    assert node("n1:cpu=4@zone=b") == ("n1", {"cpu": "4"}, (("zone", "b"),))
    assert repeated("1..4x(gpu=1)@p") == ((1, 4), {"gpu": "1"}, "p")
    assert duration_ms("1.5s") == 1500


@pytest.mark.parametrize("text", ["submit a\n", "submit a\n# why\n----\n"])
def test_a_story_that_is_not_finished_is_refused(text: str) -> None:
    with pytest.raises(ScenarioError):
        parse(text)
