"""Does a picture of an iteration say everything, and does nothing in it overlap?"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callboard.autoplace.answer.gantt import Bar, chart_lines, nice_step, seconds_text
from callboard.autoplace.answer.picture import FONT_WIDTH, Label, Picture, draw
from callboard.cli.autoplace.outputs import to_svg

GPUS, SECONDS = 64, 140.0
NAMES = ("rollout", "reward", "reference", "old_logprob", "value", "actor", "critic", "env")
EIGHT = (
    Bar("rollout", 0, 60, 0, 40, False),
    Bar("reward", 2, 62, 40, 8, True),
    Bar("reference", 3, 63, 48, 8, False),
    Bar("old_logprob", 62, 80, 0, 16, True),
    Bar("value", 62, 79, 16, 1, False),
    Bar("actor", 80, 140, 0, 64, False),
    Bar("critic", 63, 79.5, 20, 36, False),
    Bar("env", 0, 60, -1, 0, False),
)


CYCLE = (
    Bar("simulator", 0, 28, 0, 8, False),
    Bar("policy", 0, 28, 0, 8, True),
    Bar("critic", 0, 28, 0, 8, False),
    Bar("actor", 28, 36, 0, 8, False),
)


def test_ft_h3_every_member_of_a_cycle_is_shown() -> None:
    lines, _ = chart_lines(CYCLE, gpus=8, seconds=36, width=80)
    assert [line.label.strip() for line in lines] == ["GPU 0-7", "", ""]
    for line, member in zip(lines, ("simulator", "policy", "critic"), strict=True):
        shown = {piece.component: len(piece.text) for piece in line.pieces if piece.component}
        assert list(shown) == [member, "actor"]
        assert shown[member] > 50, "for as long as it runs, not one column of it"
    picture = draw(CYCLE, gpus=8, seconds=36, title="cycle")
    boxes = picture.boxes[: len(CYCLE)]
    assert len({(box.y, box.height) for box in boxes[:3]}) == 3
    assert sum(box.height for box in boxes[:3]) == pytest.approx(boxes[3].height)
    for one, other in combinations(boxes, 2):
        apart = one.x + one.width <= other.x + 1e-9 or other.x + other.width <= one.x + 1e-9
        assert apart or one.y + one.height <= other.y + 1e-9 or other.y + other.height <= one.y + 1e-9
    assert overlaps(picture) == []


def overlap(one: Label, other: Label) -> bool:
    left, top, right, bottom = one.extent
    other_left, other_top, other_right, other_bottom = other.extent
    return left < other_right and other_left < right and top < other_bottom and other_top < bottom


def overlaps(picture: Picture) -> list[tuple[str, str]]:
    return [(one.text, other.text) for one, other in combinations(picture.labels, 2) if overlap(one, other)]


@st.composite
def tilings(draw_from: st.DrawFn) -> tuple[tuple[Bar, ...], int, float]:
    """Up to eight bars on 64 GPUs that never overlap: the plane is cut again and again."""
    seconds = draw_from(st.floats(0.01, 1e5))
    pieces = [(0, GPUS, 0.0, seconds)]
    for _ in range(draw_from(st.integers(0, 7))):
        index = draw_from(st.integers(0, len(pieces) - 1))
        first, count, start, end = pieces.pop(index)
        if count > 1 and draw_from(st.booleans()):
            cut = draw_from(st.integers(1, count - 1))
            pieces += [(first, cut, start, end), (first + cut, count - cut, start, end)]
        else:
            middle = start + (end - start) * draw_from(st.floats(0.001, 0.999))
            pieces += [(first, count, start, middle), (first, count, middle, end)]
    bars = tuple(
        Bar(name, start, end, first, count, draw_from(st.booleans()))
        for name, (first, count, start, end) in zip(NAMES, pieces, strict=False)
    )
    return bars, GPUS, seconds


class TestPicture:
    def test_no_label_overlaps_for_eight_components_on_64_gpus(self) -> None:
        assert overlaps(draw(EIGHT, gpus=GPUS, seconds=SECONDS, title="One iteration")) == []

    @given(tilings())
    def test_no_label_overlaps_whatever_the_plan(self, plan: tuple[tuple[Bar, ...], int, float]) -> None:
        bars, gpus, seconds = plan
        picture = draw(bars, gpus=gpus, seconds=seconds, title="One iteration")
        assert overlaps(picture) == []

    @given(tilings())
    def test_every_label_is_inside_the_picture(self, plan: tuple[tuple[Bar, ...], int, float]) -> None:
        bars, gpus, seconds = plan
        picture = draw(bars, gpus=gpus, seconds=seconds, title="One iteration")
        for label in picture.labels:
            left, top, right, bottom = label.extent
            assert left >= 0
            assert top >= 0
            assert right <= picture.width
            assert bottom <= picture.height

    @given(tilings())
    def test_a_label_in_a_bar_stays_in_its_bar(self, plan: tuple[tuple[Bar, ...], int, float]) -> None:
        bars, gpus, seconds = plan
        picture = draw(bars, gpus=gpus, seconds=seconds, title="One iteration")
        boxes = picture.boxes[: len(bars)]
        inside = [label for label in picture.labels if label.anchor == "middle" and label.text[0].isdigit()]
        for label in (each for each in inside if not each.text.endswith(" s") or "·" in each.text):
            left, top, right, bottom = label.extent
            holders = [
                box
                for box in boxes
                if box.x <= left and box.y <= top and right <= box.x + box.width and bottom <= box.y + box.height
            ]
            assert len(holders) == 1, label

    def test_every_component_is_named_beside_the_chart_with_its_gpus(self) -> None:
        texts = [label.text for label in draw(EIGHT, gpus=GPUS, seconds=SECONDS, title="").labels]
        for number, bar in enumerate(EIGHT, start=1):
            assert f"{number} {bar.component}" in texts
        assert "GPU 40-47, 2 s to 62 s, estimated" in texts
        assert "no GPU, 0 s to 60 s" in texts

    def test_bars_have_the_proportions_of_the_plan(self) -> None:
        picture = draw(EIGHT, gpus=GPUS, seconds=SECONDS, title="")
        rollout, reward = picture.boxes[0], picture.boxes[1]
        assert rollout.width / reward.width == pytest.approx(1)
        assert rollout.height / reward.height == pytest.approx(5)
        assert reward.y == pytest.approx(rollout.y + rollout.height)

    def test_thousands_of_gpus_and_tiny_bars_still_have_a_picture(self) -> None:
        bars = (Bar("rollout", 0, 1e-3, 0, 4095, False), Bar("actor", 1e-3, 900, 4095, 1, False))
        picture = draw(bars, gpus=4096, seconds=900, title="One iteration")
        assert overlaps(picture) == []


class TestSvg:
    def test_it_is_xml_with_a_rectangle_per_bar_and_every_label(self) -> None:
        picture = draw(EIGHT, gpus=GPUS, seconds=SECONDS, title="a < b & c")
        root = ET.fromstring(to_svg(picture))
        space = "{http://www.w3.org/2000/svg}"
        assert len(root.findall(f"{space}rect")) == len(picture.boxes) + 1
        assert [text.text for text in root.findall(f"{space}text")] == [label.text for label in picture.labels]

    def test_the_width_of_each_label_is_stated_so_that_no_font_makes_them_overlap(self) -> None:
        root = ET.fromstring(to_svg(draw(EIGHT, gpus=GPUS, seconds=SECONDS, title="t")))
        for text in root.findall("{http://www.w3.org/2000/svg}text"):
            meant = len(text.text or "") * float(text.attrib["font-size"]) * FONT_WIDTH
            assert float(text.attrib["textLength"]) == pytest.approx(meant, abs=0.01)

    def test_equal_plans_give_equal_bytes(self) -> None:
        first, second = (to_svg(draw(EIGHT, gpus=GPUS, seconds=SECONDS, title="t")) for _ in range(2))
        assert first == second


class TestChartOfText:
    def test_each_line_has_the_same_width_and_names_what_runs(self) -> None:
        lines, axis = chart_lines(EIGHT, gpus=GPUS, seconds=SECONDS, width=100)
        shown = [line.label + "".join(piece.text for piece in line.pieces) for line in lines]
        assert {len(line) for line in shown} == {100 - 3}
        assert lines[0].label.strip() == "GPU 0-15"
        assert [piece.component for piece in lines[0].pieces if piece.component] == ["rollout", "old_logprob", "actor"]
        assert axis.split()[:2] == ["0", "s"]
        assert len(axis) <= 100

    @given(tilings(), st.integers(40, 200))
    def test_nothing_that_runs_is_invisible(self, plan: tuple[tuple[Bar, ...], int, float], width: int) -> None:
        bars, gpus, seconds = plan
        lines, axis = chart_lines(bars, gpus=gpus, seconds=seconds, width=width)
        assert {piece.component for line in lines for piece in line.pieces if piece.component} == {
            bar.component for bar in bars
        }
        assert all(piece.text for line in lines for piece in line.pieces)
        assert len({len(line.label) + sum(len(piece.text) for piece in line.pieces) for line in lines}) == 1
        assert len(axis) <= max(width, 40)

    def test_estimates_look_different_without_colours(self) -> None:
        lines, _ = chart_lines(EIGHT, gpus=GPUS, seconds=SECONDS, width=100)
        drawn = {piece.component: piece.text for line in lines for piece in line.pieces}
        assert "╌" in drawn["reward"]
        assert "╌" not in drawn["rollout"]

    def test_idle_gpus_are_shown(self) -> None:
        lines, _ = chart_lines((Bar("actor", 0, 5, 2, 2, False),), gpus=8, seconds=5, width=60)
        assert [line.label.strip() for line in lines] == ["GPU 0-1", "GPU 2-3", "GPU 4-7"]
        assert not "".join(piece.text for piece in lines[0].pieces).strip()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.04 s"), (95.7, "95.7 s"), (186.43, "186 s"), (1234.4, "1234 s"), (0, "0 s")]
)
def test_seconds_have_three_figures(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@given(st.floats(1e-6, 1e9), st.integers(1, 12))
def test_steps_of_an_axis_are_few_and_round(seconds: float, most: int) -> None:
    step = nice_step(seconds, most)
    assert seconds / step <= most * (1 + 1e-9)
    assert f"{step:.0e}"[0] in "125"
