"""The app: its commands, and the one place that handles errors, Ctrl-C and ``--json``."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pace import __version__
from pace.cli.commands import (
    benchmark,
    compare,
    demo,
    evaluate,
    explain,
    extract,
    finetune,
    fit,
    name,
    report,
    runs,
    serve,
)
from pace.cli.errors import line_of
from pace.cli.options import with_options
from pace.cli.output import (
    as_json,
    complain,
    console,
    first_process,
    on_terminal,
    say,
    starts_again,
    warnings_in_one_line,
)
from pace.cli.runs import Finished, Invocation
from pace.progress import in_lines
from pace.terminal import one_line


class Interrupted(Exception):
    """Ctrl-C outside the command; typer would exit without a message."""


class Commands(TyperGroup):
    """Runs a command and turns its outcome into lines and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise Interrupted(*interrupt.args) from interrupt

    def main(self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **more: Any) -> Any:  # type: ignore[override]
        arguments = list(sys.argv[1:] if args is None else args)
        # From the raw arguments, so that they also work when the rest cannot be parsed.
        json, debug = "--json" in arguments, "--debug" in arguments
        invocation = Invocation(arguments, self._options(arguments), [])
        for stream in (sys.stdout, sys.stderr):  # a terminal without Greek letters shows question marks
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")
        if not on_terminal(sys.stderr):
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        if not debug:
            os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # without a network it would report every attempt
        command = partial(super().main, arguments, standalone_mode=False, obj=invocation, **more)
        try:
            with (
                in_lines(),
                warnings_in_one_line(invocation.warnings, invocation.options, every=debug),
                redirect_stdout(sys.stderr if json else sys.stdout),  # nothing but the document may be printed there
            ):
                code, document = _outcome(command, invocation.options, debug)
            if json and document and first_process():
                print(as_json(document), flush=True)
        except BrokenPipeError:  # the reader closed the pipe; leave nothing to be flushed at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            code = 1
        if not standalone_mode:
            return code
        sys.exit(code)

    def _options(self, arguments: list[str]) -> dict[str, str]:
        """The options of the command that is called, by the names of its parameters."""
        command = next((self.commands[word] for word in arguments if word in self.commands), None)
        return {} if command is None else {str(one.name): max(one.opts, key=len) for one in command.params}


def _outcome(command: Callable[[], Any], options: dict[str, str], debug: bool) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON document of a command; prints its error."""
    try:
        found = command()
        return (0, found) if isinstance(found, dict) else (found or 0, {})
    except Interrupted as interrupt:
        code, kind, message = 130, "stopped", one_line(interrupt) or "interrupted"  # 130: as shells report Ctrl-C
    except BrokenPipeError:
        raise
    except Finished as finished:
        say(str(finished))
        return 0, finished.record
    except Exception as error:
        if debug:
            console(stderr=True).print(traceback.format_exc())
        code, kind, message = 1, "error", line_of(error, options)
        if hasattr(error, "format_message"):  # typer's: the command was mistyped
            context = getattr(error, "ctx", None)
            where = f" (see {context.command_path} --help)" if context is not None else ""
            code, message = int(getattr(error, "exit_code", 2)), one_line(error.format_message()) + where
    complain(kind, message)
    return code, {} if starts_again() else {"error": message}


app = typer.Typer(
    name="pace",
    cls=Commands,
    help="""Explain a vision transformer by concepts: of a dataset, of an image, of every patch.

    \b
    Example:
      pace fit --images photos --model vit_base_patch16_224 --concepts 30
      pace explain holiday.jpg
      pace evaluate
      pace report
    """,
    # Boxes and colours only on terminals.
    rich_markup_mode="rich" if on_terminal(sys.stdout) else None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


@app.callback(invoke_without_command=True)
def _pace(
    ctx: typer.Context, version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False
) -> None:
    if version:
        typer.echo(f"pace {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


for _module in (demo, finetune, extract, fit, explain, evaluate, report, benchmark):
    _name = _module.__name__.rpartition(".")[2]  # each has the command of its own name
    app.command()(with_options(getattr(_module, _name), makes_folder=True))
for _reads in (serve.serve, name.name, name.find, runs.runs, compare.compare):
    app.command()(with_options(_reads, makes_folder=False))
