"""The CPU service room: the model, a scoring service around it, and the same without a server.

``plan`` (:mod:`.planning`) decides from the signature alone; ``build`` (:mod:`.building`) places the model, optimised
where that was asked for, proves whether requests may be merged, and adds what ships: :mod:`.infer` is the library form,
:mod:`.serve` with :mod:`.service` the server, :mod:`.client` asks it, :mod:`.tune` measures threads. Verification
(:mod:`.serving`) starts the bundle's own service, asks it every golden over HTTP, gRPC and in process, and sends it
what nobody should (:mod:`.abuse`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from packager.host import Host
from packager.room import Missing, Plan, PlanRequest, Runner, Stage
from packager.targets.cpu.options import Options

__all__ = ["Options", "build", "missing", "plan", "runner"]


def missing(host: Host) -> list[Missing]:
    """Nothing beyond the Python packages that ``target.toml`` requires."""
    return []


def plan(request: PlanRequest) -> Plan:
    """Decide everything, from the model's graph alone.

    Raises:
        Refused: the signature can't be served, or options, shapes or precision make no sense; tensors are named.
    """
    from packager.targets.cpu.planning import plan_for

    made: Plan = plan_for(request)
    return made


def build(plan: Plan, stage: Stage) -> None:
    """Fill ``stage.folder`` with the model, the service and what deploys it.

    Raises:
        BuildError: batching was asked for by number and golden cases disprove it, ONNX Runtime refuses the model, or
            this CPU isn't of the level that the model is to be optimised for.
        StorageError: a file could not be written.
    """
    from packager.targets.cpu.building import build_service

    build_service(plan, stage)


@contextmanager
def runner(bundle: Path) -> Iterator[Runner]:
    """Serve ``bundle`` (a folder with ``bundle.json``) by its own service.

    Raises:
        VerificationError: the service doesn't start, answers wrongly when requests meet, falls over what is malformed,
            or doesn't end cleanly.
    """
    from packager.targets.cpu.serving import served

    with served(bundle) as made:
        yield made
