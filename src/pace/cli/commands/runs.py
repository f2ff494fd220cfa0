"""`pace runs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pace.cli.fits import evaluations_of, scored_by
from pace.cli.output import say, table
from pace.cli.runs import RUNS, Run, all_runs

_FOLDER = typer.Argument(metavar="FOLDER", help="The folder that holds the runs.")


def runs(folder: Annotated[Path, _FOLDER] = RUNS) -> dict[str, Any]:
    """List the runs there are, and whether to believe them.

    \b
    Example:
      pace runs
    """
    found = all_runs(folder=folder)
    scored = [run for run in found if run.record["command"] == "evaluate"]
    listed = [_line(run, scored) for run in found]
    if listed:
        table(list(listed[0]), [list(line.values()) for line in listed], words=range(5))
    else:
        say(f"no runs in {folder}; `pace fit` makes one")
    return {"runs": listed}


def _line(run: Run, scored: list[Run]) -> dict[str, str]:
    record, results = run.record, run.record["results"]
    how = record["configuration"]
    of = [(record.get(part) or {}).get(key) for part, key in (("images", "images"), ("model", "name"))]
    of += [*(how.get("datasets") or "").split(","), how.get("backbone")]  # of `pace benchmark`
    about = [Path(str(name)).name for name in [*(how.get("pictures") or [])[:1], *of] if name]
    if len(how.get("pictures") or []) > 1:
        about[0] += f" and {len(how['pictures']) - 1} more"
    if how.get("fit_run"):
        about.append(f"by {Path(how['fit_run']).name}")
    verdict = results.get("verdict", "")
    if record["command"] == "fit" and results:
        about.append(f"{results['concepts']} concepts")
        own = scored_by(run, evaluations_of(run, scored))
        verdict = "not evaluated" if own is None else own.record["results"].get("verdict", "")
    first = {"run": str(run.folder), "command": record["command"], "of": ", ".join(about)}
    return first | {"status": record["status"], "verdict": verdict}
