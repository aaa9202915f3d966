"""Pages of HTML in one frame: its style, the drawing library inside, nothing fetched, all text escaped."""

import json
from pathlib import Path

import jinja2

from evals import plots
from evals.rows import write_whole
from recipes.environment import versions
from recipes.load import RecipeError


def write_html(command: str, template: str, out: Path, **values: object) -> Path:
    """Write a page and return its path; `values` are what its template names.

    Raises:
        RecipeError: the file cannot be written.
    """
    check_out(command, out)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # the library is a script's text, which is not escaped
    text = environment.get_template(template).render(versions=versions(), library=plots.javascript(), **values)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, text)
    except OSError as error:
        raise RecipeError(f"{command}: --out {str(out)[:200]} cannot be written: {error.strerror}") from error
    return out


def check_out(command: str, out: Path) -> None:
    """Refuse what cannot be a file, before anything is computed for it."""
    if out.is_dir() or not out.name:
        raise RecipeError(f"{command}: --out {out} is a folder; name a file, as {out / (command + '.html')}")


def in_script(value: object) -> str:
    """Return JSON that may stand inside a script: "<" could end it, whatever a model or a document is called."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")  # the rest is ASCII
