"""Is a directory packed the same way each time, without what stays at home?"""

from __future__ import annotations

import os
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from callboard.client.packing import pack
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


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is no directory"):
        packed(tmp_path / "nothing")
