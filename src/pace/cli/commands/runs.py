"""`pace runs`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from pace.cli import options
from pace.cli.errors import Problem
from pace.cli.opening import evaluations_of
from pace.cli.output import say, table
from pace.cli.runs import RUNS, Run, all_runs, read_record

_FOLDER = typer.Argument(help="The folder that holds the runs.")


def runs(
    folder: Annotated[str, _FOLDER] = str(RUNS), json: options.Json = False, debug: options.Debug = False
) -> dict[str, Any]:
    """List the runs there are, what each is of, and whether to believe it.

    \b
    Example:
      pace runs
    """
    where = Path(folder).expanduser()
    found = []
    for file in where.glob("*/run.json"):
        with suppress(Problem):
            found.append(Run(file.parent, read_record(file)))
    found.sort(key=lambda run: str(run.record["started"]))
    scored = all_runs("evaluate", where)
    listed = [
        {
            "folder": str(run.folder),
            "command": run.record["command"],
            "of": _of(run.record),
            "status": run.record["status"],
            "verdict": _verdict(run, scored),
        }
        for run in found
    ]
    if listed:
        table(list(listed[0]), [list(one.values()) for one in listed], words=range(5))
    else:
        say(f"no runs in {where}; `pace fit` makes one")
    return {"runs": listed}


def _of(record: dict[str, Any]) -> str:
    """Images, model and number of concepts, as far as the run has them."""
    images = (record.get("images") or {}).get("images") or record["configuration"].get("images")
    model = (record.get("model") or {}).get("name")
    concepts = record["results"].get("concepts") if record["command"] == "fit" else None
    parts = [Path(str(part)).name for part in (images, model) if part]
    return ", ".join([*parts, *([f"{concepts} concepts"] if concepts else [])])


def _verdict(run: Run, scored: list[Run]) -> str:
    """Its own, or that of the latest evaluation of a fit."""
    if run.record["command"] != "fit":
        return str(run.record["results"].get("verdict", ""))
    ours = evaluations_of(run, scored)
    return str(ours[-1].record["results"]["verdict"]) if ours else "not evaluated"
