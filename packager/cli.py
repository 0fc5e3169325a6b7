"""The command line: a thin layer over :mod:`packager.engine`.

Standard output is data (a table, or JSON with ``--format json``), standard error is talk. Everything heavy is imported
inside the commands, so that ``packager --version`` and shell completion stay quick.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from packager import __version__
from packager.errors import PackagerError, UsageError

if TYPE_CHECKING:
    from packager.report import Listener

INTERRUPTED = 130
PATH = click.Path(path_type=Path)


def _complete_targets(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    from packager.room import kinds

    before, _comma, last = incomplete.rpartition(",")
    prefix = f"{before}," if before else ""
    return [prefix + kind for kind in kinds() if kind.startswith(last)]


def _split(values: Sequence[str]) -> list[str] | None:
    """``-t a,b -t c`` as a list; ``None`` where the option wasn't given."""
    if not values:
        return None
    return [name.strip() for value in values for name in value.split(",")]


targets_option = click.option(
    "-t", "--targets", multiple=True, metavar="A,B", shell_complete=_complete_targets,
    help="Targets of the manifest, or kinds.",
)  # fmt: skip
manifest_option = click.option(
    "-m", "--manifest", type=PATH, metavar="FILE", help="Manifest; default ./packager.toml where no MODEL is given."
)
golden_option = click.option("--golden", type=PATH, metavar="PATH", help="Golden cases, in place of the manifest's.")
format_option = click.option(
    "--format", "style", type=click.Choice(["text", "json"]), default="text", help="Format of standard output."
)
cache_option = click.option("--no-cache", is_flag=True, help="Neither take finished work from the cache nor keep it.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="packager", message="%(prog)s %(version)s")
def cli() -> None:
    """One ONNX model in, one verified bundle per target out.

    Exit status: 0 all passed, 1 a fault in packager, 2 bad usage or manifest, 3 model or goldens refused, 4 a
    toolchain is missing, 5 a target failed to build, 6 a target failed verification.
    """


@cli.command()
@click.argument("model", type=PATH, required=False)
@manifest_option
@targets_option
@click.option("-o", "--out", type=PATH, default=Path("dist"), metavar="DIR", help="Output folder; default dist.")
@golden_option
@click.option("-j", "--jobs", type=click.IntRange(min=1), metavar="N", help="Targets at once; default one per core.")
@cache_option
@click.option("--no-verify", is_flag=True, help="Don't execute bundles; they are marked so and not archived.")
@click.option("--explain", is_flag=True, help="Say why the cache didn't have a target.")
@format_option
def build(
    model: Path | None,
    manifest: Path | None,
    targets: tuple[str, ...],
    out: Path,
    golden: Path | None,
    jobs: int | None,
    no_cache: bool,
    no_verify: bool,
    explain: bool,
    style: str,
) -> None:
    """Build and verify a bundle per target."""
    from packager import engine, report
    from packager.files import to_json

    with _listener() as listener:
        result = engine.build(
            model,
            manifest=manifest,
            targets=_split(targets),
            out=out,
            golden=golden,
            jobs=jobs,
            cache=not no_cache,
            verify=not no_verify,
            listener=listener,
        )
    if explain:
        for target in result.targets:
            why = ["found in the cache"] if target.cached else list(target.misses) or ["not looked up"]
            for line in why:
                click.echo(f"{target.target}: cache: {line}", err=True)
    _say(to_json(report.report_document(result)) if style == "json" else report.table(result))
    raise SystemExit(result.exit_code)


@cli.command()
@click.argument("model", type=PATH, required=False)
@manifest_option
@targets_option
@golden_option
@cache_option
@format_option
def plan(
    model: Path | None,
    manifest: Path | None,
    targets: tuple[str, ...],
    golden: Path | None,
    no_cache: bool,
    style: str,
) -> None:
    """Show what a build would do, step by step, and do nothing."""
    from packager import engine, report

    with _listener() as listener:
        planned = engine.plan(
            model,
            manifest=manifest,
            targets=_split(targets),
            golden=golden,
            cache=not no_cache,
            listener=listener,
        )
    _say(report.plans_json(planned) if style == "json" else report.plans_text(planned))
    raise SystemExit(max((item.error.exit_code for item in planned if item.error is not None), default=0))


@cli.command()
@click.argument("bundle", type=PATH, nargs=-1, required=True)
@click.option("--import", "imported", type=PATH, metavar="FILE",
              help="Take the verdict of a self-check on another machine; run nothing here.")  # fmt: skip
@click.option("--endpoint", metavar="URL", help="Run the goldens against the service that the bundle was deployed to.")
@format_option
def verify(bundle: tuple[Path, ...], imported: Path | None, endpoint: str | None, style: str) -> None:
    """Check bundles (folders or archives) against their seals and run them against their goldens.

    Verifying executes the bundle's model in its runtime: do it to bundles whose origin you know.
    """
    from packager import engine, report

    if imported is not None and len(bundle) != 1:
        raise UsageError("--import takes one bundle, the one the verdict is about")
    if imported is not None and endpoint is not None:
        raise UsageError("--import takes a verdict and --endpoint makes one: give one of them")
    with _listener() as listener:
        results = [engine.verify(path, imported=imported, endpoint=endpoint, listener=listener) for path in bundle]
    _say(report.verified_json(results) if style == "json" else report.verified_text(results))
    raise SystemExit(max(result.exit_code for result in results))


@cli.command()
@click.argument("bundle", type=PATH)
@click.option("--model", type=PATH, required=True, metavar="FILE", help="The ONNX file it was built from.")
@click.option("--case", metavar="NAME", help="Golden case; default the first.")
@click.option("--top", type=click.IntRange(min=1), default=20, metavar="N", help="How many nodes to name; default 20.")
@format_option
def explain(bundle: Path, model: Path, case: str | None, top: int, style: str) -> None:
    """Show where a bundle drifts from its model, node by node, worst first."""
    from packager import engine, report

    with _listener() as listener:
        found = engine.explain(bundle, model, case=case, most=top, listener=listener)
    _say(report.explained_json(found) if style == "json" else report.explained_text(found))


@cli.command()
@click.argument("model", type=PATH)
@format_option
def inspect(model: Path, style: str) -> None:
    """Show a model's signature, operators, digest and hazards."""
    from packager import report
    from packager.files import to_json
    from packager.model import open_model

    opened = open_model(model)
    if style == "json":
        _say(to_json(report.model_document(opened)))
    else:
        _say(report.model_text(opened))


@cli.command()
@click.argument("model", type=PATH)
@click.option("-o", "--out", type=PATH, required=True, metavar="DIR", help="Folder for golden.json and its payload.")
@click.option("--from", "source", metavar="MODULE:CALLABLE",
              help="Source framework's function: named input arrays in, named output arrays out.")  # fmt: skip
@click.option("--inputs", type=PATH, metavar="PATH", help="Golden files that give the inputs; default synthesised.")
@click.option("--cases", type=click.IntRange(1, 1000), default=3, metavar="N", help="How many to synthesise.")
@click.option("--seed", type=int, default=0, metavar="N", help="Seed of the synthesis.")
@click.option("--dim", "dims", multiple=True, metavar="NAME=SIZE", help="Size of a symbolic dimension.")
@click.option(
    "--score", is_flag=True, help="Say which share of small faults the cases would catch, and what they miss."
)
@format_option
def golden(
    model: Path,
    out: Path,
    source: str | None,
    inputs: Path | None,
    cases: int,
    seed: int,
    dims: tuple[str, ...],
    score: bool,
    style: str,
) -> None:
    """Write golden cases for a model: inputs, and the reference's or the source framework's outputs."""
    from packager import engine, report

    with _listener() as listener:
        made = engine.golden(
            model, out, source=source, inputs=inputs, cases=cases, seed=seed, dims=_sizes(dims), score=score,
            listener=listener,
        )  # fmt: skip
    _say(report.captured_json(made) if style == "json" else report.captured_text(made))


def _sizes(dims: Sequence[str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for text in dims:
        name, _, size = text.rpartition("=")
        if not name or not size.isdecimal() or len(size) > 18 or int(size) < 1:
            raise UsageError(f"--dim {text}: not NAME=SIZE with a size of 1 or more")
        sizes[name] = int(size)
    return sizes


@cli.command()
@click.argument("model", type=PATH)
@targets_option
@click.option("-o", "--out", type=PATH, default=Path("packager.toml"), metavar="FILE", help="Default packager.toml.")
@click.option("--force", is_flag=True, help="Overwrite the file if it is there.")
def init(model: Path, targets: tuple[str, ...], out: Path, force: bool) -> None:
    """Write a commented manifest for a model."""
    from packager import room
    from packager.files import exists, write_text
    from packager.manifest_init import init_text
    from packager.model import open_model

    if exists(out) and not force:
        raise UsageError(f"{out}: already exists", "add --force to overwrite it, or name another file with -o")
    names = _split(targets) or list(room.kinds())
    for name in names:
        room.kind_named(name)
    text = init_text(open_model(model), names, out.absolute().parent)
    try:
        write_text(out, text)
    except OSError as error:
        raise UsageError(f"{out}: can't write there: {error.strerror}") from error
    click.echo(f"wrote {out}; build with `packager build -m {out}`", err=True)


@cli.command()
@targets_option
@format_option
def doctor(targets: tuple[str, ...], style: str) -> None:
    """Say which kinds can be built and verified here, and how to get what is missing."""
    from packager import report
    from packager.host import this_host
    from packager.room import kind_named, kinds, missing_requirements

    names = _split(targets)
    chosen = [kind_named(name) for name in names] if names is not None else list(kinds().values())
    found = [(kind, missing_requirements(kind, this_host())) for kind in chosen]
    _say(report.doctor_json(found) if style == "json" else report.doctor_text(found))
    raise SystemExit(4 if names is not None and any(missing for _, missing in found) else 0)


@cli.command(name="targets")
@format_option
def list_targets(style: str) -> None:
    """List the target kinds, their precisions and the level verification reaches."""
    from packager import report
    from packager.room import kinds

    chosen = list(kinds().values())
    _say(report.kinds_json(chosen) if style == "json" else report.kinds_text(chosen))


@cli.command()
def schema() -> None:
    """Print the JSON Schema of packager.toml."""
    from packager.manifest_schema import json_schema

    _say(json_schema())


def _say(text: str) -> None:
    """Write data to standard output; names with lone surrogates must not break it.

    Raises:
        StorageError: it is a file, and the disk is full.
    """
    from packager.files import storage_error

    stream = sys.stdout
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _quiet()
        raise storage_error("writing", error, Path("standard output")) from error


@contextlib.contextmanager
def _listener() -> Iterator[Listener]:
    from packager.report import PlainProgress, RichProgress

    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with RichProgress() as progress:
            yield progress
    else:
        yield PlainProgress()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: run a command and exit with its status."""
    for name in ("SIGTERM", "SIGHUP"):  # SIGHUP: the terminal was closed; Windows hasn't got it
        with contextlib.suppress(ValueError, OSError, AttributeError):  # not in the main thread, or no such signal
            if signal.getsignal(getattr(signal, name)) != signal.SIG_IGN:  # nohup
                signal.signal(getattr(signal, name), _interrupt)
    sys.exit(_run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    try:
        cli.main(args=None if arguments is None else list(arguments), prog_name="packager", standalone_mode=False)
        return 0
    except SystemExit as ended:
        return int(ended.code or 0)
    except PackagerError as error:
        from packager.report import error_text

        click.echo(error_text(error), err=True, nl=False)
        return error.exit_code
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.ClickException as error:
        error.show()
        return 2
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted; nothing half-written was left", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left (`| head`): point stdout at nothing, so that closing it is quiet.
        _quiet()
        return 0
    except OSError as error:
        from packager.files import storage_error

        stored = storage_error("running", error)  # the machine's trouble: a full disk, no permission, no more files
        click.echo(f"error: {stored.message}\nhint: {stored.hint}", err=True)
        return stored.exit_code
    except Exception:  # noqa: BLE001 - the last line of defence
        click.echo(f"error: a fault in packager itself; please report it\n{traceback.format_exc()}", err=True)
        return 1


def _quiet() -> None:
    """Let standard output go nowhere, so that Python's own flush of it at the end fails no more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
