# Sourced by the other scripts: finds a Python, makes virtual environments, installs from a lock.
# Nothing outside the checkout is written but the package client's own download cache.

fail() {
    printf 'error: %s\n' "$1" >&2
    shift
    if (($#)); then printf '       %s\n' "$@" >&2; fi
    exit 1
}

has_uv() { command -v uv >/dev/null 2>&1; }

python_is_supported() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1
}

# Without uv, the interpreter itself must bring pip into a new environment. Debian splits that off.
can_make_venv() { has_uv || "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

# Prints the Python to build environments from: $PYTHON, or the first on PATH that will do.
find_python() {
    local candidate lame=
    if [[ -n ${PYTHON:-} ]]; then
        python_is_supported "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.11, 3.12 or 3.13"
        printf '%s\n' "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        python_is_supported "$candidate" || continue
        if can_make_venv "$candidate"; then
            command -v "$candidate"
            return
        fi
        lame=$candidate
    done
    if has_uv && candidate=$(uv python find --no-python-downloads '>=3.11,<3.14' 2>/dev/null); then
        printf '%s\n' "$candidate"
        return
    fi
    if [[ -n $lame ]]; then
        fail "$lame cannot make virtual environments" \
            "install its venv module (Debian, Ubuntu: apt-get install python3-venv) or uv"
    fi
    fail "no Python 3.11, 3.12 or 3.13 found" \
        "install one (Debian, Ubuntu: apt-get install python3 python3-venv; with uv: uv python install 3.13)" \
        "or name one: PYTHON=/path/to/python3 $0"
}

# make_venv DIR: makes the environment unless a working one is there. A broken one, for example
# after its Python was upgraded away, is made anew.
make_venv() {
    local dir=$1 base
    if [[ -e $dir/bin/python ]] && python_is_supported "$dir/bin/python"; then return; fi
    if [[ -e $dir && ! -e $dir/pyvenv.cfg ]]; then
        fail "$dir exists and is not a virtual environment" "move it away and try again"
    fi
    base=$(find_python)
    if has_uv; then
        uv venv --quiet --clear --no-project --python "$base" "$dir"
    else
        "$base" -m venv --clear "$dir"
    fi
}

# pip_install DIR ARGS…: installs into the environment with uv where present, else with pip.
pip_install() {
    local dir=$1
    shift
    if has_uv; then
        # pip compiles what it installs; without, every start of a program does, where Python may write no cache.
        uv pip install --quiet --compile-bytecode --python "$dir/bin/python" "$@"
        return
    fi
    # An environment that uv made has no pip.
    "$dir/bin/python" -m pip --version >/dev/null 2>&1 || "$dir/bin/python" -m ensurepip >/dev/null
    "$dir/bin/python" -m pip install -qq --disable-pip-version-check --no-input "$@"
}

# install_locked DIR FILE: exactly what FILE pins, every archive checked against its hashes.
install_locked() { pip_install "$1" --no-deps --require-hashes --requirement "$2"; }

# one_at_a_time PYTHON FILE: waits until no other process holds FILE, then holds it until this
# process ends. The lock belongs to the open file, so it outlives the Python that takes it; flock(1)
# would do the same, but macOS has none.
one_at_a_time() {
    exec 9<>"$2"
    "$1" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null && return
    echo "waiting for another $(basename "$0") in this checkout …" >&2
    "$1" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
}
