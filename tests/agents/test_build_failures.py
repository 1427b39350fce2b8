"""Is the reason of a failed build found in what pip and uv print, and is what it says to do of use?"""

from __future__ import annotations

import platform
import re

import pytest

from callboard.agents.supplies.build_failures import first_error, reason_of

PRINTED = r"""
## pip, no such version
ERROR: Ignored the following versions that require a different python version: 2.5.0 Requires-Python >=3.12
ERROR: Could not find a version that satisfies the requirement numpy==99 (from versions: 1, 2.0, 3.0, 4.0, 5)
ERROR: No matching distribution found for numpy==99
=> there is no numpy==99: the last versions are 2.0, 3.0, 4.0, 5; name one of these
## uv, no such version
error: No solution found when resolving dependencies
  cause: Because there is no version of numpy==99.0 and you require numpy==99.0, we can conclude that
=> there is no numpy==99.0; name a version that there is
## pip, no such package
Looking in indexes: https://me:secret@mirror/simple
ERROR: Could not find a version that satisfies the requirement tool (from versions: none)
=> no package tool was found in https://…@mirror/simple; correct its name, or say where it is
## uv, no such package
  × No solution found when resolving dependencies:
  ╰─▶ Because tool was not found in the package registry and you require tool, we can conclude
=> no package tool was found in the index of the node; correct its name
## uv, no index
  cause: Because tool was not found in the provided package locations and you require tool
=> no package tool was found in the provided package locations; correct its name
## pip, index unreachable
Looking in indexes: https://mirror/simple
WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'NewConnectionError('<object>: Failed
to establish a new connection: [Errno -2] Name or service not known')': /simple/tool/
ERROR: Could not find a version that satisfies the requirement tool (from versions: none)
=> https://mirror/simple can't be reached from the node: Name or service not known; name one that it reaches in
## uv, index unreachable
error: Failed to fetch: http://127.0.0.1:9/simple/numpy/
  cause: error sending request for url (http://127.0.0.1:9/simple/numpy/)
  cause: tcp connect error
  cause: Connection refused (os error 111)
=> http://127.0.0.1:9 can't be reached from the node: Connection refused; name one that it reaches in
## index without a trusted certificate
Looking in indexes: https://mirror/simple
WARNING: Retrying after connection broken by 'SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]
ERROR: Could not find a version that satisfies the requirement tool (from versions: none)
=> the certificate of https://mirror/simple is not trusted; name its authority in the environment
## index that asks for a login
  cause: Because tool was not found in the package registry and you require tool, we can conclude

hint: An index URL (http://m/simple) could not be queried due to a lack of valid credentials (401 Unauthorized)
=> http://m/simple asks for a login; put it into ~/.netrc
## index without https
WARNING: The repository located at mirror is not a trusted or secure host and is being ignored. If this repository
ERROR: Could not find a version that satisfies the requirement tool (from versions: none)
=> pip takes nothing from mirror without https; use https, or set PIP_TRUSTED_HOST=mirror
## pip, another Python
ERROR: Ignored the following versions that require a different python version: 1.21.6 Requires-Python >=3.7,<3.11
ERROR: Ignored the following versions that require a different python version: 2.5.0 Requires-Python >=3.12
ERROR: Could not find a version that satisfies the requirement numpy==2.5.0 (from versions: 2.4.5, 2.4.6)
=> numpy==2.5.0 needs Python >=3.12, and the node has 3.11.7; name a version for this Python (the last are 2.4.5, 2.4.6)
## pip, always another Python
ERROR: Ignored the following versions that require a different python version: 1 Requires-Python >=3.13
ERROR: Could not find a version that satisfies the requirement tool (from versions: none)
=> tool needs Python >=3.13, and the node has 3.11.7; name a package for this Python, or choose nodes with that Python
## pip, a folder for another Python
ERROR: Package 'newpy' requires a different Python: 3.11.7 not in '>=3.13'
=> newpy needs Python >=3.13, and the node has 3.11.7; name a version for this Python, or
## uv, another Python
error: No solution found when resolving dependencies
  cause: Because the current Python version (3.11.7) does not satisfy Python>=3.12 and numpy==2.5.0 depends on
=> numpy==2.5.0 needs Python >=3.12, and the node has 3.11.7; name a version for this Python, or choose nodes
## uv, a project for another Python
error: The requested interpreter resolved to Python 3.11.7, which is incompatible
with the project's Python requirement: `>=3.13`
=> the project needs Python >=3.13, and the node has 3.11.7; correct its requires-python, or
## pip, no compiler
  × Building wheel for fast (pyproject.toml) did not run successfully.
  ╰─> [6 lines of output]
      error: [Errno 2] No such file or directory: 'gcc'
  ERROR: Failed building wheel for fast
=> fast is built from source, for which the node lacks gcc; name a version that has a wheel for Python 3.11.7 on MACHINE
## uv, no compiler
error: Failed to build `fast @ file:///d/fast`
  cause: The build backend returned an error
         error: command 'x86_64-linux-gnu-gcc' failed: No such file or directory
=> fast is built from source, for which the node lacks x86_64-linux-gnu-gcc; name a version that has a wheel
## no header
  m.c:1:10: fatal error: Python.h: No such file or directory
  ERROR: Failed building wheel for fast
=> fast is built from source, for which the node lacks Python.h; name a version that has a wheel
## no CUDA
Collecting fast==1
      OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root.
× Getting requirements to build wheel did not run successfully.
=> fast==1 is built from source, for which the node lacks CUDA_HOME; name a version that has a wheel
## a package that is needed to build
Collecting flash-attn
  × Getting requirements to build wheel did not run successfully.
      ModuleNotFoundError: No module named 'torch'
=> flash-attn imports torch while it is built, apart from the other requirements; name a wheel of it
## a build that fails otherwise
Processing ./odd
  × python setup.py egg_info did not run successfully.
        File "setup.py", line 1
      SyntaxError: invalid syntax
  note: This error originates from a subprocess, and is likely not a problem with pip.
error: subprocess-exited-with-error
=> odd can't be built from source: SyntaxError: invalid syntax; name a version that has a wheel
## pip, a bad line
ERROR: Invalid requirement: 'numpy=1.2' (from line 1 of callboard-requirements.txt)
Hint: = is not a valid operator. Did you mean == ?
=> line 1 of the requirements is no requirement: numpy=1.2; correct it
## a later pip, a bad line
ERROR: Invalid requirement: 'a b': Expected end or semicolon (after name and no valid version specifier)
    a b
      ^ (from line 7 of x.txt)
=> line 7 of x.txt is no requirement: a b; correct it
## uv, a bad line
error: Couldn't parse requirement in `callboard-requirements.txt` at position 0
  cause: no such comparison operator "=", must be one of ~= ==
         numpy=1.2
              ^^^^
=> in the requirements a line is no requirement: numpy=1.2; correct it: no such comparison operator "="
## pip, a conflict
ERROR: Cannot install numpy==2.4.0 because these package versions have conflicting dependencies.

The conflict is caused by:
    The user requested numpy==2.4.0
    scipy 1.11.4 depends on numpy<1.28.0

To fix this you could try to:
=> requirements exclude each other: The user requested numpy==2.4.0; scipy 1.11.4 depends on numpy<1.28.0; loosen
## uv, a conflict
error: No solution found when resolving dependencies
  cause: Because scipy==1.11.4 depends on numpy<1.28.0 and you require scipy==1.11.4, you require numpy<1.28.0.
         And because you require numpy==2.4.0, we can conclude that your requirements are unsatisfiable.
=> requirements exclude each other: Because scipy==1.11.4 depends on numpy<1.28.0 and you require scipy==1.11.4, you
## pip, a hash
ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have updated the package versions
    six==1 from https://files/six.whl (from -r hash.txt (line 1)):
        Expected sha256 00
             Got        8abb2f1d
=> six==1 has another hash than the requirements say; if this is the file that you want, write its hash: 8abb2f1d
## no git
ERROR: Cannot find command 'git' - do you have 'git' installed and in your PATH?
=> a requirement comes from git, which the node doesn't have; install git there, or name an archive
## git that can't reach it
         fatal: unable to access 'https://h/x.git/': Failed to connect to h
=> a requirement can't be fetched with git: unable to access 'https://h/x.git/': Failed to connect to h; check
## a wheel for another machine
ERROR: foo-1.0-cp39-cp39-win_amd64.whl is not a supported wheel on this platform.
=> foo-1.0-cp39-cp39-win_amd64.whl is not for Python 3.11.7 on MACHINE; name one that is
## an address that isn't there
  ERROR: HTTP error 404 while getting https://p/such.whl
=> https://p/such.whl answers 404; correct that address
## a full disk
ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device
=> its disk is full; free some of it, or choose other nodes with node_selector
## a lock that can't be read
  cause: TOML parse error at line 2, column 11
=> pyproject.toml or uv.lock can't be read, line 2; correct it; `uv lock` writes a new uv.lock
"""
"""By pip 23.2, uv 0.13 and others, shortened."""


@pytest.mark.parametrize("kind", PRINTED.split("## ")[1:], ids=lambda kind: kind.partition("\n")[0])
def test_the_reason_is_the_real_one_with_a_remedy(kind: str) -> None:
    head, _, begins = kind.strip().partition("\n=> ")
    log = head.partition("\n")[2]
    for text in (log, f"$ uv pip install\n{log}\n", log.replace("\n", "\r\n")):
        told = reason_of(text, "3.11.7")
        assert told.startswith(begins.replace("MACHINE", platform.machine()))
        assert re.search("; .{20,}", told), "what to do"
        assert len(told.splitlines()) == 1
        assert len(told) < 900


def test_a_log_of_no_known_kind_is_told_by_its_first_error() -> None:
    log = "Collecting x\nERROR: Ignored the following versions\nerror: It broke\n  cause: nobody knows\n\nbye"
    assert (reason_of(log, "3.11"), first_error(log)) == ("", "error: It broke cause: nobody knows")
    assert first_error("one\r two \n\n") == "two"
    assert first_error("") == ""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "text",
    ["error: x\n", "a", " ", "\n", "fatal error: ", "Failed to build `", "Invalid requirement: '", "× git clone "],
)
def test_a_long_log_is_read_once(text: str) -> None:
    """With patterns that look again for each character this takes minutes."""
    reason_of(text * (400_000 // len(text)), "3.11")
