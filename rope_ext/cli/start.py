"""The command itself: what holds for every command, how errors are told, how several processes meet."""

import io
import json
import logging
import os
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

import rope_ext

if TYPE_CHECKING:
    from recipes.ranks import Ranks

LOOK, STRETCH, MEASURE, SHOW = "Look", "Stretch", "Measure", "Show"
EVERYWHERE = {"--debug": "--debug", "--quiet": "--quiet", "-q": "--quiet"}
"""Options of the command itself that are taken behind a command's name too."""

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Stretch the context window of a LLaMA, and measure which method keeps it alive.",
    epilog="Exit status: 0 done; 2 bad input, one line on stderr says what; 3 finished with failed cells; 130 and 143 "
    "stopped by Ctrl-C or SIGTERM, with the words to go on. Each command's --help has examples.",
)


@dataclass(slots=True, kw_only=True)
class State:
    """What the words before a command set, and whether other processes were met."""

    debug: bool = False
    quiet: bool = False
    joined: bool = False


state = State()  # one process, one command line


def examples(*lines: str) -> str:
    """Return the end of a command's help: lines that can be typed as they stand."""
    return "\n\n".join(("Examples:", *lines))


def main() -> None:
    """Run the command line; bad input is one line on stderr and exit status 2."""
    for stream in (sys.stdout, sys.stderr):  # a terminal without a character shows another one, not an error
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        status = app(in_front(sys.argv[1:]), standalone_mode=False)
    except Exception as error:
        # An unknown option, a word where a number belongs. Newer typers carry a click of their own, so that the class
        # is known by what it can do.
        if type(error).__name__ == "Abort":  # Ctrl-C
            sys.exit(130)
        if not hasattr(error, "format_message"):
            raise
        status = _tell_usage(error)
    sys.exit(status)


def _tell_usage(error: Any) -> int:
    """Print what was wrong with the words of a command in one line, or the help if there were none."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return 2
    command = getattr(getattr(error, "ctx", None), "command_path", "rope-ext")
    line = " ".join(str(error.format_message()).split())
    typer.echo(f"rope-ext: {line} (see {command} --help)", err=True)
    return 2


def in_front(words: list[str]) -> list[str]:
    """Return the words of a command line with the command's own options first, wherever they stood."""
    end = words.index("--") if "--" in words else len(words)
    ours = [EVERYWHERE[word] for word in words[:end] if word in EVERYWHERE]
    return [*ours, *(word for word in words[:end] if word not in EVERYWHERE), *words[end:]]


def _version(value: bool) -> None:
    if value:
        typer.echo(f"rope-ext {rope_ext.__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="show the traceback of an error")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="show results and errors alone, no progress")] = False,
    version: Annotated[  # noqa: ARG001  (its callback has printed it)
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Set what holds for all commands."""
    state.debug, state.quiet, state.joined = debug, quiet, False
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, stream=sys.stderr, format="%(message)s")


@contextmanager
def one_line_errors() -> Generator[None]:
    """Turn what was refused in the block into one line on stderr and exit status 2."""
    from evals.errors import EvalError
    from rope_ext.errors import RopeExtError

    try:
        yield
    except (RopeExtError, EvalError) as error:
        if state.debug:
            traceback.print_exc()
        _refuse(str(error))
    except UnicodeError as error:
        _refuse(f"a name that is not UTF-8 cannot be used: {ascii(getattr(error, 'object', error))[:200]}")
    except OSError as error:
        if state.debug:
            traceback.print_exc()
        _refuse(f"{error.filename or 'output'}: {error.strerror or error}")


def _refuse(message: str) -> NoReturn:
    # Of several processes with one command line the first says what is wrong with it; what befalls a later one alone,
    # when they have met, that one says.
    rank = os.environ.get("RANK", "0")
    if rank == "0" or state.joined:
        where = "" if rank == "0" else f"process {rank}: "
        typer.echo("rope-ext: " + where + " ".join(message.split()), err=True)
    raise typer.Exit(2)


def quiet_libraries() -> None:
    """Keep transformers' progress bars and advice off the screen; our own bar says how far a run is."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # before anything imports it: transformers' GGUF reader asks it directly
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    hub_logging.set_verbosity_error()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def print_json(value: object) -> None:
    """Print one JSON document."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


@contextmanager
def together() -> Generator["Ranks"]:
    """Meet the other processes of a launcher, if there are any, and part from them however the block ends."""
    from recipes.ranks import ToldElsewhereError, join, leave
    from recipes.screen import StoppedError

    ranks = join()
    state.joined = ranks.world > 1
    try:
        yield ranks
    except ToldElsewhereError:
        raise typer.Exit(2) from None
    except StoppedError as error:
        if ranks.is_first:
            typer.echo(f"rope-ext: {error}", err=True)
        raise typer.Exit(error.status) from None
    finally:
        leave(ranks)
