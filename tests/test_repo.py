"""Is the repository itself in order? Stubs, imports, the lock and what files may say."""

import ast
import importlib.util
import inspect
import pydoc
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import callboard
from scripts import lockfile

ROOT = Path(__file__).parent.parent
GENERATED = ROOT / "callboard" / "v1"


def tracked_files() -> list[Path]:
    """What git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def modules_after(statement: str) -> set[str]:
    """The modules of a fresh interpreter that has run the statement."""
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


def defined_in(path: Path) -> set[str]:
    """The functions and classes of a module, and the methods of these as `Class.method`."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    top = [node for node in ast.parse(path.read_text()).body if isinstance(node, kinds)] if path.exists() else []
    methods = [(node.name, each.name) for node in top for each in node.body if isinstance(each, kinds)]
    return {node.name for node in top} | {".".join(each) for each in methods}


class TestStubs:
    @pytest.mark.slow
    @pytest.mark.timeout(300)  # The first run installs the compiler.
    def test_the_committed_stubs_are_what_the_protos_generate(self) -> None:
        check = subprocess.run(["scripts/protos", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
        assert check.returncode == 0, check.stdout + check.stderr

    def test_no_released_message_or_call_changes_its_meaning(self) -> None:
        """`protos/released.binpb` is the API of the last release (`buf build protos -o protos/released.binpb`)."""
        buf = Path(sys.executable).parent / "buf"
        command = [str(buf), "breaking", "protos", "--against", "protos/released.binpb"]
        check = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert check.returncode == 0, check.stdout + check.stderr


class TestImports:
    def test_importing_callboard_loads_nothing_heavy(self) -> None:
        heavy = {"ray", "grpc", "google.protobuf", "pydantic", "asyncio", "typer", "rich"}
        assert not heavy & modules_after("import callboard")

    @pytest.mark.parametrize("name", sorted(callboard._PUBLIC))
    def test_every_public_name_loads_and_is_listed(self, name: str) -> None:
        if importlib.util.find_spec(callboard._PUBLIC[name]) is None:
            pytest.skip(f"{callboard._PUBLIC[name]} is not written yet")
        assert getattr(callboard, name) is not None
        assert name in dir(callboard)
        assert name in callboard.__all__

    def test_help_shows_a_program_and_every_public_class(self) -> None:
        shown = pydoc.plain(pydoc.render_doc(callboard))
        assert "with SyncClient() as cb:" in shown
        classes = [name for name in callboard.__all__ if inspect.isclass(getattr(callboard, name))]
        assert len(classes) > 30
        assert not [name for name in classes if f"class {name}(" not in shown and f"class {name}\n" not in shown]

    def test_an_unknown_name_is_an_attribute_error(self) -> None:
        with pytest.raises(AttributeError, match="no attribute 'Clinet'"):
            _ = callboard.Clinet

    def test_a_type_checker_sees_the_names_that_load(self) -> None:
        """Names whose module does not exist yet are left out: a type checker would refuse them."""
        tree = ast.parse(Path(callboard.__file__).read_text())
        (block,) = (node for node in tree.body if isinstance(node, ast.If))
        imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
        seen = {alias.asname: node.module for node in imports for alias in node.names}
        written = {name: home for name, home in callboard._PUBLIC.items() if importlib.util.find_spec(home)}
        assert seen == written

    def test_every_folder_with_modules_is_a_package(self) -> None:
        """import-linter does not see the others, so their imports would go unchecked."""
        folders = {path.parent for path in (ROOT / "callboard").rglob("*.py")}
        assert not sorted(folder for folder in folders if not (folder / "__init__.py").exists())


class TestLock:
    @staticmethod
    def requirements() -> list[tuple[str, Requirement]]:
        """Every (extra, requirement) of pyproject.toml that must be locked."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        by_extra = {lockfile.BASE: project["dependencies"], **project["optional-dependencies"]}
        return [
            (extra, Requirement(line))
            for extra, lines in by_extra.items()
            for line in lines
            if extra not in lockfile.UNLOCKED and not line.startswith("callboard[")
        ]

    @staticmethod
    def entries() -> list[lockfile.Entry]:
        return lockfile.parse((ROOT / "requirements.lock").read_text())

    def test_the_lock_satisfies_every_requirement_of_every_extra(self) -> None:
        for extra, requirement in self.requirements():
            pins = [
                Requirement(entry.text.split(" \\", 1)[0])
                for entry in lockfile.select(self.entries(), [extra])
                if canonicalize_name(entry.package.split()[0]) == canonicalize_name(requirement.name)
            ]
            assert pins, f"{extra}: {requirement} is not locked; run scripts/lock"
            for pin in pins:
                (version,) = (specifier.version for specifier in pin.specifier)
                assert version in requirement.specifier, f"{extra}: {requirement} is locked as {pin}"

    def test_the_agent_brings_ray_without_its_dashboard(self) -> None:
        def names(*extras: str) -> set[str]:
            return {entry.package.split()[0] for entry in lockfile.select(self.entries(), extras)}

        assert "ray" in names("agent")
        assert "aiohttp" in names("head") - names("agent")
        assert "ray" not in names("controller")

    def test_every_entry_is_pinned_and_hashed(self) -> None:
        for entry in self.entries():
            assert re.match(r"[a-z0-9-]+==\S+", entry.text), entry.text
            assert "--hash=sha256:" in entry.text, entry.text

    def test_an_unknown_extra_is_refused_with_the_known_ones(self) -> None:
        with pytest.raises(lockfile.LockError, match="no extra 'agents'; there are: agent,"):
            lockfile.check_extras(self.entries(), ["agents"])


class TestTexts:
    def test_no_file_names_a_machine_path_or_a_registry(self) -> None:
        # One letter of each stands in brackets, so that this line does not find itself.
        forbidden = re.compile(r"/wor[k]/|/roo[t]/|pyp[i]\.org|pythonhoste[d]|npmj[s]\.org")
        found = [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
            for path in tracked_files()
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
            if forbidden.search(line)
        ]
        assert not found, "\n".join(found)

    def test_every_document_that_is_named_is_there(self) -> None:
        """Links of documents, and what docstrings refer a reader to."""
        # "./examples/…" is a file in the user's own directory.
        named = re.compile(r"(?<!/)\b(?:docs|examples|benchmarks)/[\w/]+\.(?:md|py|ya?ml)\b")
        linked = re.compile(r"\]\((?!\w+:)([^)#\s]+)[^)]*\)")
        gone = []
        for path in tracked_files():
            if path.suffix not in {".py", ".md", ".proto", ".sh", ".toml", ".yaml"} or path.parent == GENERATED:
                continue
            text = path.read_text()
            places = [ROOT / name for name in named.findall(text)]
            if path.suffix == ".md":
                places += [path.parent / name for name in linked.findall(text)]
            gone += [f"{path.relative_to(ROOT)}: {place}" for place in places if not place.exists()]
        assert not gone, "\n".join(gone)

    def test_every_room_and_answer_of_the_map_is_there(self) -> None:
        """One hop from CONTRIBUTING.md leads somewhere; a file that is named alone lies beside the one before it."""
        rows = [
            line.split("|")[1:3] for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line[:2] == "| "
        ]
        gone, before = [], ROOT
        for question, answer in rows:
            here = answer if question.strip().endswith("?") else question.partition(",")[0]
            for name in re.findall(r"`([\w/]+(?:/\w+|\.py))`", here):
                place = next(
                    (base / name for base in (ROOT, ROOT / "callboard", before) if (base / name).exists()), None
                )
                gone += [f"{question.strip()} {name}"] if place is None else []
                before = place.parent if place is not None else before
        assert not gone, "\n".join(gone)

    def test_every_function_of_the_map_is_where_it_says(self) -> None:
        """A function in brackets is defined in the file before it."""
        text = (ROOT / "CONTRIBUTING.md").read_text()
        named = re.findall(r"`([\w/]+\.py)` \(`([\w.]+)`", text)
        assert len(named) > 15
        gone, folder = [], ROOT / "callboard"
        for file, name in named:
            place = ROOT / "callboard" / file if "/" in file else folder / file
            folder = place.parent
            gone += [] if name in defined_in(place) else [f"{file} {name}"]
        assert not gone, "\n".join(gone)

    def test_no_module_is_longer_than_six_hundred_lines(self) -> None:
        """A module answers one question and fits in the head."""
        lengths = {
            str(path.relative_to(ROOT)): len(path.read_text().splitlines())
            for path in tracked_files()
            if path.suffix == ".py" and path.parent != GENERATED
        }
        assert not {name: length for name, length in lengths.items() if length > 600}
