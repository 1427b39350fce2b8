"""The program `callboard`: its verbs and its entry point."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from callboard._version import __version__
from callboard.cli.options import TlsCaOption, TlsCertOption, TlsKeyOption, keep_tls, option, wishes
from callboard.cli.verbs import Verbs

app = typer.Typer(
    name="callboard",
    cls=Verbs,
    help="A control plane for the Ray actors of RL training: who runs where, on which GPUs, and who yields to whom.",
    epilog="Start here: callboard demo rlhf",
    no_args_is_help=True,
    rich_markup_mode=None,  # Plain help: rich's takes 160 ms to import, this one 0.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"callboard {__version__}")
        raise typer.Exit


def _behind_the_verb(_: typer.Context, option: typer.CallbackParam, value: str | None) -> None:
    """People type options first, and would be told that there are none of that name."""
    if value is not None:
        raise typer.BadParameter(f"it belongs behind the verb: callboard VERB {option.opts[0]} {value}")


@app.callback()
def _global_options(
    _version: Annotated[
        bool, option("--version", "Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    context: Annotated[
        str, option("--context", "NAME", "Use this context, which `callboard login` made; none: use no context.")
    ] = "",
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    _controller: Annotated[
        str | None, option("--controller", "--address", "-c", "", hidden=True, callback=_behind_the_verb)
    ] = None,
    _output: Annotated[str | None, option("--output", "-o", "", hidden=True, callback=_behind_the_verb)] = None,
) -> None:
    """A control plane for the Ray actors of RL training: who runs where, on which GPUs, and who yields to whom."""
    wishes.reset()
    keep_tls(tls_ca, tls_cert, tls_key)
    if context:
        os.environ["CALLBOARD_CONTEXT"] = context


def main() -> None:
    # Read once, when gRPC is imported: its fork handlers stall programs that start others (docs/agents.md).
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    # Else gRPC writes a line for each connection that fails, of whoever tries.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    for number, argument in enumerate(sys.argv[1:], 1):
        if not argument.isascii() and argument.encode(errors="replace").decode() != argument:
            # Bytes of another encoding: no message carries them, and nothing here is named so.
            shown = argument.encode(errors="backslashreplace").decode()
            typer.echo(f"error: Argument {number} is not UTF-8: {shown}", err=True)
            sys.exit(2)
    try:
        app(prog_name="callboard")
    except KeyboardInterrupt:
        # Ctrl-C before anything was started.
        sys.exit(130)
