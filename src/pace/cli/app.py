"""The app: its commands, and the one place that handles errors, Ctrl-C and ``--json``."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from functools import partial
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pace import __version__
from pace.cli.commands import benchmark, demo, evaluate, explain, extract, finetune, fit, report
from pace.cli.errors import line_of, one_line
from pace.cli.options import with_options
from pace.cli.output import as_json, complain, on_terminal, warnings_in_one_line
from pace.cli.processes import wait_before_reporting
from pace.cli.runs import Invocation

INTERRUPTED = 130  # as shells report Ctrl-C


class Interrupted(Exception):
    """Ctrl-C outside the command; typer would exit without a message."""


class Commands(TyperGroup):
    """Runs a command and turns its outcome into lines and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise Interrupted(*interrupt.args) from interrupt

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        arguments = list(sys.argv[1:] if args is None else args)
        invocation = Invocation(arguments, self._options(arguments))
        for stream in (sys.stdout, sys.stderr):  # a terminal without Greek letters shows question marks
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")
        if not on_terminal(sys.stderr):
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        if not invocation.debug:
            os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # without a network it would report every attempt
        try:
            with ExitStack() as stack:
                stack.enter_context(
                    warnings_in_one_line(invocation.warnings, invocation.options, every=invocation.debug)
                )
                if invocation.json:  # nothing else may be printed on standard output
                    stack.enter_context(redirect_stdout(sys.stderr))
                code, document = self._outcome(
                    invocation, partial(super().main, invocation.arguments, prog_name, complete_var, False, **extra)
                )
            if invocation.json and document:
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

    def _outcome(self, invocation: Invocation, command: Callable[..., Any]) -> tuple[int, dict[str, Any]]:
        """Exit code and JSON document of a command; prints its error."""
        try:
            found = command(obj=invocation)
            return (0, found) if isinstance(found, dict) else (found or 0, {})
        except Interrupted as interrupt:
            message = one_line(interrupt) or "interrupted"
            complain("stopped", message)
            return INTERRUPTED, {"error": message}
        except BrokenPipeError:
            raise
        except Exception as error:
            wait_before_reporting(error)
            if invocation.debug:
                traceback.print_exc()
            code, message = _code_and_message(error, invocation.options)
            complain("error", message)
            return code, {"error": message}


def _code_and_message(error: Exception, options: dict[str, str]) -> tuple[int, str]:
    if isinstance(error, typer.Abort):
        return 1, "aborted"
    if hasattr(error, "format_message"):  # typer's: the command was mistyped
        context = getattr(error, "ctx", None)
        where = f" (see {context.command_path} --help)" if context is not None else ""
        return int(getattr(error, "exit_code", 2)), one_line(error.format_message()) + where
    return 1, line_of(error, options)


app = typer.Typer(
    name="pace",
    cls=Commands,
    help="Explain a vision transformer by concepts: of a dataset, of an image, of every patch.",
    # Boxes and colours only on terminals.
    rich_markup_mode="rich" if on_terminal(sys.stdout) else None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pace {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _pace(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


for _command in (
    demo.demo,
    finetune.finetune,
    extract.extract,
    fit.fit,
    explain.explain,
    evaluate.evaluate,
    report.report,
    benchmark.benchmark,
):
    app.command()(with_options(_command))
