"""Why the build of an environment failed, in one sentence with what helps, read out of what pip or uv printed.

Their last line rarely is the reason: pip says "No matching distribution" also where the index can't be reached, and a
package that is built from source fails with the output of its compiler. The kinds are tried in their order: what names
a cause comes before what names a consequence. A log of none of them is told by its first error.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass

_SHOWN_CHARACTERS = 300
_SHOWN_VERSIONS = 4
_CAUSES = ("cause:", "Caused by:", "╰─▶")

_TOOL = (
    r"(?:/[\w/.-]{0,200}/)?((?:x86_64-linux-gnu-|aarch64-linux-gnu-)?(?:gcc|g\+\+|cc|c\+\+)|clang(?:\+\+)?|"
    r"nvcc|cmake|ninja|make|cargo|rustc|swig)"
)

_WHEEL = "name a version that has a wheel for Python {python} on {machine}, lay one beside the requirements "
_WHEEL += "(`--find-links ./wheels`), or "

_OTHER_PYTHON = "choose nodes with that Python, env: {{conda: NAME}} or a container"
_OTHER_INDEX = "the index that has it (`--extra-index-url` in the requirements)"
_INDEX_OF_AGENT = "in the environment of the node's agent (PIP_INDEX_URL, UV_DEFAULT_INDEX for uv)"


@dataclass(frozen=True)
class _Kind:
    """One kind of failure.

    Attributes:
        pattern: how its log is known.
        what: what happened, with the pattern's groups as {0}, {1}, … (of a group that isn't there the next that is).
    """

    pattern: str
    what: str
    remedy: str


_KINDS = (
    _Kind(
        r"No space left on device|\(os error 28\)",
        "its disk is full",
        "free some of it, or choose other nodes with node_selector",
    ),
    _Kind(
        r"ensurepip is not available",
        "its Python can't make environments",
        "install python3-venv there, or uv",
    ),
    _Kind(
        rf"No such file or directory: '{_TOOL}'|command '{_TOOL}' failed: No such file|"
        rf"unable to execute '?{_TOOL}'?: No such file|[ \n]{_TOOL}: (?:command )?not found|"
        r"(CMake) must be installed|can't find (Rust compiler)|(CUDA_HOME) environment variable is not set",
        "{package} is built from source, for which the node lacks {0}",
        f"{_WHEEL}install that on the node",
    ),
    _Kind(
        r"fatal error: (\S+): No such file|cannot find -(l\S+)",
        "{package} is built from source, for which the node lacks {0}",
        f"{_WHEEL}install the system's package with it on the node (python3-dev for Python.h)",
    ),
    _Kind(
        r"ModuleNotFoundError: No module named '([\w.]+)'",
        "{package} imports {0} while it is built, apart from the other requirements",
        "name a wheel of it by its address, or use env: {{uv: pyproject.toml}} with no-build-isolation-package in "
        "[tool.uv], on nodes with uv",
    ),
    _Kind(
        r"Cannot find command 'git'|Git executable not found",
        "a requirement comes from git, which the node doesn't have",
        "install git there, or name an archive or a wheel of it by its address",
    ),
    _Kind(
        r"fatal: ([^\n]+)|× git (?:clone|fetch) [^\n]{0,200}?(\w+://\S+)",
        "a requirement can't be fetched with git: {0}",
        "check its address, and that the node reaches it without a password; or bring its code along (py_modules)",
    ),
    _Kind(
        r"Invalid requirement: '?([^'\n]{1,200})'?(?:: [^\n]{1,200}\n[^\n]{1,200}\n[^\n]{0,200})? "
        r"\(from line (\d+) of (\S+?)\)",
        "line {1} of {2} is no requirement: {0}",
        "correct it; a version is named as in NAME==1.2",
    ),
    _Kind(
        r"[Cc]ouldn't parse requirement in `(\S+?)`[^\n]*\n[^\w\n]*(?:cause: |Caused by: )?([^\n]+)\n\s*([^\n]*)",
        "in {0} a line is no requirement: {2}",
        "correct it: {1}",
    ),
    _Kind(
        r"DO NOT MATCH THE HASHES[^\n]*\n +(\S+) |[Hh]ash mismatch for `([^`]+)`",
        "{0} has another hash than the requirements say",
        "if this is the file that you want, write its hash: {hash}",
    ),
    _Kind(
        r"Package '(\S{1,100})' requires a different Python: \S+ not in '([^']+)'",
        "{0} needs Python {1}, and the node has {python}",
        f"name a version for this Python, or {_OTHER_PYTHON}",
    ),
    _Kind(
        r"does not satisfy Python(\S+) and (\S+) depends",
        "{1} needs Python {0}, and the node has {python}",
        f"name a version for this Python, or {_OTHER_PYTHON}",
    ),
    _Kind(
        r"the (project)'s Python requirement: `([^`]+)`",
        "the {0} needs Python {1}, and the node has {python}",
        f"correct its requires-python, or {_OTHER_PYTHON}",
    ),
    _Kind(
        r"Ignored the following versions[^\n]* (\S{1,40}) Requires-Python ([^;\n]+)[^\n]*\n"
        r"[^\n]*satisfies the requirement (\S+?==\1) ",
        "{2} needs Python {1}, and the node has {python}",
        f"name a version for this Python (the last are {{versions}}), or {_OTHER_PYTHON}",
    ),
    _Kind(
        r"Requires-Python ([^;\n]+)\n[^\n]{0,99}satisfies the requirement (\S+) [^\n]*\(from versions: none\)",
        "{1} needs Python {0}, and the node has {python}",
        f"name a package for this Python, or {_OTHER_PYTHON}",
    ),
    _Kind(
        r"([\w.+-]{1,200}\.whl) is not a supported wheel|\b([\w.=-]{1,100}) has no wheels with a matching",
        "{0} is not for Python {python} on {machine}",
        "name one that is, or the package alone: then the right file is chosen",
    ),
    _Kind(
        r"satisfies the requirement (\S+) [^\n]*\(from versions: (?!none)",
        "there is no {0}: the last versions are {versions}",
        f"name one of these, or {_OTHER_INDEX}",
    ),
    _Kind(
        r"(CERTIFICATE_VERIFY_FAILED|invalid peer certificate|self.signed certificate)",
        "the certificate of {index} is not trusted",
        "name its authority in the environment of the node's agent: PIP_CERT=FILE, SSL_CERT_FILE=FILE for uv",
    ),
    _Kind(
        r"located at (\S+) is not a trusted or secure host",
        "pip takes nothing from {0} without https",
        "use https, or set PIP_TRUSTED_HOST={0} for the node's agent",
    ),
    _Kind(
        r"index URL \((\S+)\) could not be queried[^\n]*40[13]|HTTP error 40[13] while getting (\S+)|"
        r"client error \(40[13][^\n]{0,99} \((\S+)\)",
        "{0} asks for a login",
        f"put it into ~/.netrc on the node, or into the address of its index {_INDEX_OF_AGENT}",
    ),
    _Kind(
        r"HTTP error (4\d\d) while getting (\S+)|client error \((4\d\d)[^\n]{0,99} \((\S+)\)",
        "{1} answers {0}",
        "correct that address",
    ),
    _Kind(
        r"(Connection refused|Name or service not known|Temporary failure in name resolution|Network is unreachable|"
        r"No route to host|[Cc]onnection reset|[Rr]ead timed out|[Cc]onnect(?:ion)? time(?:out|d out)|"
        r"operation timed out|Cannot connect to proxy|Tunnel connection failed)",
        "{index} can't be reached from the node: {0}",
        f"name one that it reaches {_INDEX_OF_AGENT}, or bring wheels along (`--no-index` and `--find-links ./wheels` "
        "in the requirements)",
    ),
    _Kind(
        r"satisfies the requirement (\S+) [^\n]*\(from versions: none|\b([\w.-]{1,100}) was not found in",
        "no package {0} was found in {index}",
        "correct its name, or say where it is (`--extra-index-url` or `--find-links` in the requirements)",
    ),
    _Kind(
        r"there (?:is|are) no versions? of (\S+) and",
        "there is no {0}",
        f"name a version that there is, or {_OTHER_INDEX}",
    ),
    _Kind(
        r"The conflict is caused by:\n((?: +[^\n]+\n)+)|No solution found [^\n]*\n((?:[^\n]+(?:\n|\Z))+)",
        "requirements exclude each other: {0}",
        "loosen one of them",
    ),
    _Kind(
        r"TOML parse error at (line \d+)",
        "pyproject.toml or uv.lock can't be read, {0}",
        "correct it; `uv lock` writes a new uv.lock",
    ),
    _Kind(
        r"did not run successfully|Failed building|Failed to build `",
        "{package} can't be built from source: {error}",
        f"{_WHEEL}correct what stops its build",
    ),
)


def reason_of(log: str, python: str) -> str:
    """What happened and what helps.

    Returns:
        A sentence without its end; empty: it is of no kind that is known.
    """
    log = _lines(log)
    for kind in _KINDS:
        if (found := re.search(kind.pattern, log)) is not None:
            groups = [_plain(each) for each in found.groups() if each]
            facts = _facts(log, python)
            return f"{_short(kind.what.format(*groups, **facts))}; {kind.remedy.format(*groups, **facts)}"
    return ""


def first_error(log: str) -> str:
    """The first error of a log with the causes that uv puts below it, or its last line; short enough for a sentence."""
    lines = [line.strip() for line in _lines(log).splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if line.startswith(("ERROR:", "error:", "×")) and "Ignored the following versions" not in line:
            below = (
                each for each in lines[number + 1 : number + 4] if each.startswith(("cause:", "Caused by:", "╰─▶"))
            )
            return _short(" ".join((line, *below)))
    return _short("".join(lines[-1:]))


def _lines(log: str) -> str:
    """Without what a bar of progress is drawn with."""
    return log.replace("\r\n", "\n").replace("\r", "\n")


def _facts(log: str, python: str) -> Mapping[str, str]:
    """What sentences name besides what their pattern found."""
    package = r"Failed building wheel for ([\w.-]+)|Failed to build `?([\w.-]+)|Building wheel for ([\w.-]+)"
    index = r"Failed to fetch: `?(https?://[^\s/]+)|Looking in indexes: (.+)|found in (the provided package locations)"
    where = _last(index, log) or _last(r"Looking in links: (.+)", log) or "the index of the node"
    versions = _last(r"\(from versions: ([^)]*)\)", log).split(", ")
    return {
        "package": _last(package, log) or _last(r"(?:Collecting|Processing) (?:\./)?(\S+)", log) or "a requirement",
        "index": re.sub(r"//[^/@\s]+@", "//…@", where),  # without its password
        "versions": ", ".join(versions[-_SHOWN_VERSIONS:]),
        "error": _last(r"\n[ \t│]*([\w.]*[Ee]rror: (?!subprocess)[^\n]+)", log) or "its build failed",
        "hash": _last(r"Got +(\w+)|Computed:\s+(\S+)", log),
        "python": python,
        "machine": platform.machine(),
    }


def _last(pattern: str, log: str) -> str:
    """The first group that is there, of where the pattern is found last."""
    found = [next(filter(None, each.groups())) for each in re.finditer(pattern, log)]
    return found[-1] if found else ""


def _plain(text: str) -> str:
    """One line, without the signs that stand before causes; a file by the name that its user knows."""
    words = (re.sub(r"^[^\w]*(?:cause: |Caused by: )?", "", line).strip(" .") for line in text.splitlines())
    shown = "; ".join(filter(None, words)) if "\n" in text else text.strip()
    return shown.replace("callboard-requirements.txt", "the requirements")


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
