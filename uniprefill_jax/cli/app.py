"""The commands under one name, and what becomes of their errors."""

import sys

import typer

from uniprefill_jax.cli.bench import bench
from uniprefill_jax.cli.calibrate import calibrate
from uniprefill_jax.cli.convert import convert
from uniprefill_jax.cli.demo import demo
from uniprefill_jax.cli.eval import evaluate
from uniprefill_jax.cli.explain import explain
from uniprefill_jax.cli.generate import generate
from uniprefill_jax.cli.info import info
from uniprefill_jax.cli.profile import profile
from uniprefill_jax.cli.serve import serve
from uniprefill_jax.errors import UniPrefillError

ERROR_EXIT_CODE = 2

app = typer.Typer(
    help="Faster first tokens on long prompts: UniPrefill drops the prompt tokens that the question does not need.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
COMMANDS = {
    command.__name__: command for command in (demo, generate, explain, serve, convert, info, profile, calibrate)
}
for _command in COMMANDS.values():
    app.command()(_command)
GROUPS = {"bench": bench, "eval": evaluate}
for _name, _group in GROUPS.items():
    app.add_typer(_group, name=_name)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit; what a user can mend is one line on stderr and exit code 2.

    Args:
        arguments: words after the program's name; None takes those of the process. None at all shows the help.
    """
    words = sys.argv[1:] if arguments is None else arguments
    try:
        exit_code = app(words or ["--help"], prog_name="uniprefill", standalone_mode=False)
    except UniPrefillError as error:
        _fail(str(error))
    except typer.TyperException as error:
        command = f"uniprefill {words[0]}" if words and words[0] in COMMANDS | GROUPS else "uniprefill"
        _fail(f"{error.format_message()} (see {command} --help)")
    except OSError as error:
        _fail(f"{error.strerror or error}: {error.filename}" if error.filename else str(error))
    else:
        sys.exit(exit_code if isinstance(exit_code, int) else 0)


def _fail(message: str) -> None:
    print("error:", " ".join(message.split()), file=sys.stderr)
    sys.exit(ERROR_EXIT_CODE)
