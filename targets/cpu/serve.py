"""Serve the model of this folder by the Open Inference Protocol (KServe v2), over HTTP and gRPC.

    pip install -r requirements.txt
    python serve.py

Each setting is a flag (``python serve.py --help``), else an environment variable (``SERVICE_HTTP_PORT`` for
``--http-port``), else what the bundle was built with. SIGTERM stops it, after what was begun has been answered.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from packager.targets.cpu.infer import Session, read_settings

FOLDER = Path(__file__).resolve().parent
HELP = {
    "host": "address to listen on; 0.0.0.0 is every network",
    "http_port": "port of HTTP; 0 takes a free one",
    "grpc_port": "port of gRPC; 0 takes a free one, -1 leaves gRPC out",
    "max_batch": "rows merged into one run at most; 0 merges nothing",
    "delay_us": "microseconds the first request of a batch may wait for others",
    "runs": "runs of the model at the same time",
    "max_body_mb": "megabytes a request may have",
    "max_in_flight": "requests answered at the same time; more get status 429",
    "drain_seconds": "seconds between not being ready and taking nothing more, on SIGTERM",
    "stop_seconds": "seconds that requests have to end, after that",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the settings, load the model, serve."""
    from packager.targets.cpu.service.run import Settings, serve

    try:
        built = read_settings(FOLDER)
        given = vars(_parser(built, Settings).parse_args(arguments))
        threads = given.pop("threads")
        settings = Settings(**given)
        if settings.max_batch > 1 and not built.get("rows_independent", False):
            raise ValueError(f"requests of this model can't be merged: {built.get('batching', 'it was not proven')}")
        model = Session(FOLDER, threads)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    status: int = serve(model, settings)
    return status


def _parser(built: Mapping[str, Any], settings: type[Any]) -> argparse.ArgumentParser:
    """Flags of every setting. Defaults: the environment, else the bundle, else the class."""
    parser = argparse.ArgumentParser(description="Serve this folder's model over HTTP and gRPC.")
    for field in fields(settings):
        kind = type(field.default)
        default = os.environ.get(f"SERVICE_{field.name.upper()}", built.get(field.name, field.default))
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=kind, default=str(default), help=f"{HELP[field.name]} ({default})"
        )
    threads = os.environ.get("SERVICE_THREADS", built.get("threads", 0))
    told = f"threads of one run; 0 is one for each core ({threads})"
    parser.add_argument("--threads", type=int, default=str(threads), help=told)
    return parser


if __name__ == "__main__":
    sys.exit(main())
