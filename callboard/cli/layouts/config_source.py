"""The config that is meant: a file, or the name of a Hydra config, composed where it has ``defaults:``.

Hydra and OmegaConf are options. Without them a file works as long as nothing that is needed comes from another file or
from an interpolation.
"""

from __future__ import annotations

import difflib
import importlib
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from callboard.cli.show.exits import BAD_INPUT, CommandFailed
from callboard.model.faults import Fault, InvalidInput
from callboard.model.frozen import dataclass
from callboard.model.inputs import read_yaml
from callboard.model.inputs.located import OddNumber

SUFFIXES = (".yaml", ".yml")

COMPOSED = " (composed)"
"""After the name of a config whose text is not that of its file: its lines are those of the whole config."""

_HYDRA = "callboard[hydra]"

_TOP_DEFAULTS, _TOP_CLUSTER = re.compile(r"^defaults:", re.MULTILINE), re.compile(r"^cluster:", re.MULTILINE)

# Sections that a placement is read from. What only adds to others can be left out.
_DECIDING = ("_global_", "algorithm", "cluster", "data", "profile_data", "runner")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSource:
    """A config and where it came from.

    Attributes:
        file: the file that was named; of a composed config the primary one.
        own: what the file alone says.
        config: the whole of it: a mapping, or OmegaConf's DictConfig.
        composed: other files belong to it.
        folder: where the configs are, when one was stated.
        left_out: why files that belong to it were not read; empty: they were, or there are none.
    """

    file: Path
    text: str
    own: Mapping[str, Any]
    config: Mapping[str, Any]
    composed: bool
    folder: Path | None
    left_out: str = ""
    overrides: tuple[str, ...] = ()

    def placement_text(self) -> str:
        """The text that its placement is read from: the file, or the whole config where that says more.

        Interpolations are resolved section by section: one that can't be, such as a path of another machine, is left
        as it is written, for no placement needs it.
        """
        if not self.composed and not self.overrides:
            return self.text
        import yaml  # noqa: PLC0415 - what is no composed config needs none

        return str(yaml.safe_dump(_resolved(self.config), sort_keys=False, allow_unicode=True))


def read_text(file: Path) -> str:
    """The text of a file; "-" is the standard input.

    Raises:
        CommandFailed: it can't be read.
    """
    name = "The input" if str(file) == "-" else str(file)
    try:
        return typer.get_text_stream("stdin").read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        why, remedy = "It is not UTF-8 text.", "Save it as UTF-8."
        raise CommandFailed(f"{name} can't be read.", why, remedy, BAD_INPUT) from error
    except OSError as error:
        remedy = "Name a YAML or JSON file, or - for the input."
        raise CommandFailed(f"{name} can't be read.", f"{error.strerror or error}.", remedy, BAD_INPUT) from error


def rl_config(name: str, config_path: Path | None, overrides: Sequence[str]) -> tuple[str, str]:
    """An RLinf config, and what it is called: the text of a file, or of the whole of a config that Hydra composes.

    Args:
        name: path of a file, "-" for the standard input, or name of a config below ``config_path``.
        config_path: folder of Hydra configs; None: ``name`` is a path.
        overrides: as on Hydra's command line: ``cluster.component_placement.env=0-1``.

    Raises:
        As :func:`load_config`.
    """
    if config_path is None and not overrides:
        text = read_text(Path(name))
        # One whose placement is in another file is composed, as far as that can be.
        if name == "-" or not _TOP_DEFAULTS.search(text) or _TOP_CLUSTER.search(text):
            return "input" if name == "-" else name, text
    if name == "-":
        why = "Overrides and folders of configs are for files."
        raise CommandFailed("The input can't be composed.", why, "Name a file.", BAD_INPUT)
    source = load_config(name, config_path, overrides)
    composed = source.composed or source.overrides
    return f"{source.file}{COMPOSED}" if composed else str(source.file), source.placement_text()


def load_config(name: str, config_path: Path | None, overrides: Sequence[str] = ()) -> ConfigSource:
    """The config that a command line names.

    RLinf's embodied configs name the settings of their simulator and their model, which lie in its own folders. Where
    these aren't, the file alone is read, for it says everything about placement itself.

    Args:
        name: path of a YAML file, or name of a config below ``config_path``.
        config_path: folder of Hydra configs; None: ``name`` is a path.
        overrides: as on Hydra's command line. Those of a file that is composed of others are Hydra's own; those of any
            other file are plain KEY=VALUE.

    Raises:
        CommandFailed: there is no such config, or an option is needed that isn't installed.
        InvalidInput: it is no YAML, or can't be composed.
    """
    file = _file_of(name, config_path)
    try:
        # Line ends stay as they are: the file may be written again.
        text = file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = f"{error.strerror}." if isinstance(error, OSError) else "It is not UTF-8 text."
        remedy = "Name another." if isinstance(error, OSError) else "Save it as UTF-8."
        raise CommandFailed(f"The config {file} can't be read.", why, remedy, BAD_INPUT) from error
    try:
        own = read_yaml(text, ours=False)
    except InvalidInput as error:
        raise InvalidInput(
            Fault(fault.field or str(file), fault.message, fault.line, fault.column) for fault in error.faults
        ) from error
    alone: dict[str, Any] = {"file": file, "text": text, "own": own, "composed": False, "overrides": tuple(overrides)}
    if not _defaults(own):
        return ConfigSource(config=_alone(own, text, overrides), folder=config_path, **alone)
    try:
        config = _composed(file, config_path, overrides)
    except (CommandFailed, InvalidInput) as error:
        if config_path is not None or any(_decides(entry) for entry in _defaults(own)):
            raise
        why = error.failure.why.rstrip(".") if isinstance(error, CommandFailed) else error.faults[0].message
        return ConfigSource(config=_alone(own, text, overrides), folder=None, left_out=why, **alone)
    return ConfigSource(config=config, folder=config_path, **alone | {"composed": True})


def config_names(folder: Path) -> list[str]:
    """Names of the configs below ``folder``, sorted: paths without their suffix."""
    files = (path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    return sorted(str(path.relative_to(folder).with_suffix("")) for path in files)


def _file_of(name: str, config_path: Path | None) -> Path:
    if config_path is None:
        if Path(name).is_file():
            return Path(name)
        why = "It is not a file; the name of a Hydra config needs the folder that it is in."
        raise CommandFailed(f"There is no config {name}.", why, "Name a file, or add --config-path FOLDER.", BAD_INPUT)
    # A whole path is itself: joined to a folder it stays what it is.
    candidates = [config_path / f"{name}{suffix}" for suffix in ("", *SUFFIXES)]
    found = next((path for path in candidates if path.is_file()), None)
    if found is not None:
        return found
    names = config_names(config_path)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    listed = ", ".join(near or names[:10]) or "none"
    raise CommandFailed(
        f"There is no config {name} in {config_path}.",
        f"{'Similar ones' if near else 'What is there'}: {listed}.",
        "Name one of them, or another folder with --config-path.",
        BAD_INPUT,
    )


def _alone(own: Mapping[str, Any], text: str, overrides: Sequence[str]) -> Mapping[str, Any]:
    """What the file itself says, its interpolations resolved where OmegaConf is installed."""
    if overrides:
        from callboard.cli.show.changes import changed, read_changes  # noqa: PLC0415 - few command lines have some

        # As texts: Hydra takes actor=1:0 for one, too, and the placement of the file is written anew.
        changes = read_changes((each.lstrip("+") for each in overrides), "cluster.component_placement.env=0-1")
        own = _as_written(changed(read_yaml(text, ours=False, odd=True), changes))
    if "${" not in text or find_spec("omegaconf") is None:
        return own
    found: Mapping[str, Any] = importlib.import_module("omegaconf").OmegaConf.create(dict(own))
    return found


def _as_written(value: Any) -> Any:
    """What YAML reads in another base than people do, as it stands in the file."""
    if isinstance(value, Mapping):
        return {key: _as_written(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_as_written(inner) for inner in value]
    return value.written if isinstance(value, OddNumber) else value


def _defaults(own: Mapping[str, Any]) -> list[str]:
    """The other files that belong to it. Overrides of Hydra's own settings decide nothing here."""
    defaults = own.get("defaults")
    entries = [
        " ".join(f"{key}/{value}" for key, value in entry.items()) if isinstance(entry, dict) else str(entry)
        for entry in (defaults if isinstance(defaults, list) else [])
    ]
    return [entry for entry in entries if entry != "_self_" and not entry.startswith("override hydra/")]


def _decides(entry: str) -> bool:
    """Whether a default may add to what a placement is read from: ``env/sim@env.train`` does not."""
    _, at, package = entry.partition("@")
    return not at or package.split("/")[0].split(".")[0] in _DECIDING


def _resolved(config: Mapping[str, Any]) -> dict[str, Any]:
    if not hasattr(config, "_content"):  # no DictConfig
        return dict(config)
    omegaconf, errors = importlib.import_module("omegaconf"), importlib.import_module("omegaconf.errors")
    plain: dict[str, Any] = omegaconf.OmegaConf.to_container(config, resolve=False)
    for section, value in plain.items():
        if isinstance(value, dict | list):
            with suppress(errors.OmegaConfBaseException):
                plain[section] = omegaconf.OmegaConf.to_container(config[section], resolve=True)
    return plain


def _composed(file: Path, config_path: Path | None, overrides: Sequence[str]) -> Mapping[str, Any]:
    if find_spec("hydra") is None:
        raise CommandFailed(
            f"The config {file} is made of several files.",
            "It has defaults:, and Hydra, which composes them, is not installed.",
            f"Install it: `pip install '{_HYDRA}'`.",
            BAD_INPUT,
        )
    hydra = importlib.import_module("hydra")
    errors = importlib.import_module("hydra.errors")
    omega_errors = importlib.import_module("omegaconf.errors")
    # Not resolved: a config may be a link to somewhere else, and its defaults are still those of this folder.
    file = file.absolute()
    folder = (config_path or file.parent).absolute()
    if not file.is_relative_to(folder):  # A whole path was named beside a folder.
        folder = file.parent
    name = str(file.relative_to(folder).with_suffix(""))
    try:
        # Hydra warns of defaults without _self_, which RLinf's configs don't have; their order is Hydra's own.
        with (
            warnings.catch_warnings(action="ignore", category=UserWarning),
            hydra.initialize_config_dir(config_dir=str(folder), version_base="1.3"),
        ):
            composed: Mapping[str, Any] = hydra.compose(config_name=name, overrides=list(overrides))
    except RecursionError as error:
        raise InvalidInput([Fault(str(file), "can't be composed: its defaults name each other in a circle")]) from error
    except (errors.HydraException, omega_errors.OmegaConfBaseException, ValueError, TypeError) as error:
        # The last two are what Hydra says of defaults that are no list of names.
        raise InvalidInput([Fault(str(file), f"can't be composed: {_told(error)}")]) from error
    return composed


def _told(error: BaseException) -> str:
    """What an error of Hydra says, on one line; some say nothing and leave it to their cause."""
    text = " ".join(str(error).split())
    cause = error.__cause__ or error.__context__
    return text or (_told(cause) if cause is not None else type(error).__name__)
