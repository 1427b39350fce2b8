"""Is a directory packed the same way each time, without what stays at home?"""

from __future__ import annotations

import os
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from callboard.client.packing import pack, pack_module, pack_requirements
from callboard.model.faults import InvalidInput


def packed(directory: Path) -> tuple[str, list[str]]:
    file = BytesIO()
    name = pack(directory, file)
    file.seek(0)
    with tarfile.open(fileobj=file) as archive:
        return name, archive.getnames()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    directory = tmp_path / "tree"
    for name in ("train.py", "pkg/a.py", "pkg/data/big.bin", "logs/1.log", "logs/keep.log", ".git/config", "x.pyc"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)
    return directory


def test_the_same_files_have_the_same_name_whenever_and_whoever_packs(tree: Path) -> None:
    name, _ = packed(tree)
    for path in tree.rglob("*.py"):
        os.utime(path, (1, 1))
    assert packed(tree)[0] == name
    (tree / "train.py").write_text("other")
    assert packed(tree)[0] != name


@pytest.mark.parametrize("git", [False, True])
def test_what_is_ignored_stays_at_home(tree: Path, git: bool) -> None:
    (tree / ".gitignore").write_text("*.pyc\n/logs/*\n!logs/keep.log\n")
    (tree / ".callboardignore").write_text("# data\npkg/data/\n")
    if git:
        (tree / ".git/config").unlink()
        subprocess.run(["git", "init", "-q", str(tree)], check=True)
    names = {name for name in packed(tree)[1] if not name.startswith(".")}
    assert names == {"train.py", "pkg/a.py", "logs/keep.log"}


@pytest.mark.parametrize("target", ["/etc/passwd", "../../secret"])
def test_a_link_that_leads_out_is_refused_with_its_name(tree: Path, target: str) -> None:
    (tree / "link").symlink_to(target)
    (tree / "link2").symlink_to("train.py")
    (tree.parent.parent / "secret").write_text("")
    with pytest.raises(InvalidInput, match="link is a link that leads out"):
        packed(tree)


def test_links_that_lead_to_each_other_travel_as_they_are(tree: Path) -> None:
    (tree / "a").symlink_to("b")
    (tree / "b").symlink_to("a")
    assert {"a", "b"} <= set(packed(tree)[1])


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is not a directory"):
        packed(tmp_path / "nothing")


IGNORED = [
    ("*.log", "a.log b/c.log", "a.txt b/c.logs"),
    ("/only", "only", "b/only"),
    ("data/", "data/x b/data/y", "c/data"),
    ("b/*.py", "b/x.py", "x.py a/b/x.py b/c/x.py"),
    ("**/gen/*.c", "gen/a.c b/gen/a.c", "gen/a/b.c"),
    ("out/**", "out/a out/b/c", "output"),
    ("a/**/z", "a/z a/b/z a/b/c/z", "b/a/z a/zz"),
    ("f?o[0-9].[!c]", "foo1.x fxo9.h", "foo1.c foa.x f/o1.x"),
    ("logs/\n!logs/keep", "logs/keep", "keep"),
    ("*.bin\n!keep.bin", "a.bin", "keep.bin b/keep.bin"),
    ("\\#a\n\\!b", "#a !b", "a b"),
    ("# a\n\nx ", "x", "y"),
    ("x\\ ", "x ", "x"),
    ("[", "", "["),
]


@pytest.mark.parametrize("git", [False, True])
@pytest.mark.parametrize(("rules", "gone", "kept"), IGNORED, ids=range(len(IGNORED)))
def test_rules_mean_what_they_mean_to_git_also_without_it(
    tmp_path: Path, rules: str, gone: str, kept: str, git: bool
) -> None:
    for name in gone.split(" ") + kept.split(" ") if rules != "x\\ " else ["x ", "x"]:
        if name:
            (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "in" / name).write_text("")
    (tmp_path / (".gitignore" if git else "in/.callboardignore")).write_text(rules + "\n")
    if git:
        (tmp_path / ".gitignore").rename(tmp_path / "in/.gitignore")
        subprocess.run(["git", "init", "-q", str(tmp_path / "in")], check=True)
    names = set(packed(tmp_path / "in")[1]) - {".gitignore", ".callboardignore"}
    assert names == ({"x"} if rules == "x\\ " else {each for each in kept.split(" ") if each})


def test_each_folder_may_add_to_what_is_ignored_and_take_it_back(tree: Path) -> None:
    (tree / ".gitignore").write_text("*.pyc\n*.log\n.git\n")
    (tree / "logs/.gitignore").write_text("!keep.log\n")
    (tree / "pkg/.callboardignore").write_text("/data\n")
    names = {name for name in packed(tree)[1] if not Path(name).name.startswith(".")}
    assert names == {"train.py", "pkg/a.py", "logs/keep.log"}


def test_a_repository_inside_and_one_that_is_ignored_as_a_whole_travel(tree: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tree / "pkg/data")], check=True)
    for name in (".git/config", "x.pyc"):
        (tree / name).unlink()
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    assert "pkg/data/big.bin" in packed(tree)[1]
    (tree / ".gitignore").write_text("pkg\n")
    assert set(packed(tree / "pkg")[1]) == {"a.py", "data/big.bin"}


def test_second_names_of_a_file_and_links_inside_travel(tree: Path) -> None:
    os.link(tree / "train.py", tree / "second.py")
    (tree / "to").symlink_to("pkg")
    names = packed(tree)[1]
    assert {"train.py", "second.py", "to"} <= set(names)
    assert "to/a.py" not in names


def test_a_module_travels_under_its_own_name(tree: Path) -> None:
    file = BytesIO()
    pack_module(tree / "pkg", file, "py_modules[0]")
    with tarfile.open(fileobj=BytesIO(file.getvalue())) as archive:
        assert archive.getnames() == ["pkg/a.py", "pkg/data/big.bin"]
    file = BytesIO()
    pack_module(tree / "train.py", file, "py_modules[0]")
    with tarfile.open(fileobj=BytesIO(file.getvalue())) as archive:
        assert archive.getnames() == ["train.py"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("x.pyc", "neither a directory nor a .py file; wheels"),
        ("none", "is not there"),
        ("a-b", "`import a-b` is impossible"),
    ],
)
def test_what_nobody_could_import_is_refused(tree: Path, name: str, why: str) -> None:
    (tree / "a-b").mkdir()
    with pytest.raises(InvalidInput, match=why):
        pack_module(tree / name, BytesIO(), "py_modules[0]")


@pytest.mark.parametrize(
    ("files", "way"),
    [
        ({"needs.txt": "-r needs.txt"}, "needs.txt → needs.txt"),
        ({"needs.txt": "-c more/b.txt", "more/b.txt": "-r c.txt", "more/c.txt": "-r b.txt"}, "b.txt → more/c.txt → "),
    ],
)
def test_requirements_that_include_themselves_are_refused(tmp_path: Path, files: dict[str, str], way: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInput, match=f"includes itself .*{way}"):
        pack_requirements(tmp_path / "needs.txt", BytesIO(), "env.requirements")


def test_a_requirements_file_that_two_others_include_travels(tmp_path: Path) -> None:
    for name, text in {"a.txt": "-r b.txt\n-r c.txt", "b.txt": "-r d.txt", "c.txt": "-r d.txt", "d.txt": ""}.items():
        (tmp_path / name).write_text(text)
    packed = BytesIO()
    pack_requirements(tmp_path / "a.txt", packed, "env.requirements")
    with tarfile.open(fileobj=packed) as archive:
        assert set(archive.getnames()) == {"b.txt", "c.txt", "d.txt", "callboard-requirements.txt"}
