"""Building: the model, the settings of its service, the service itself, and what deploys it."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from packager.errors import BuildError
from packager.files import storage_errors, to_json, write_text
from packager.goldens import GoldenSet
from packager.model import open_model
from packager.names import dns_label
from packager.render import render
from packager.room import Plan, Stage, kind_named
from packager.rows import objection
from packager.selfcheck import ship_loader
from packager.targets.cpu import infer
from packager.targets.cpu.optimising import optimise
from packager.targets.cpu.options import Options
from packager.targets.cpu.planning import batching, optimisation
from packager.transforming import place_model

HOME = Path(__file__).parent
SHIPPED = ("client.py", "serve.py", "tune.py")
FILES = ("requirements.txt", "Dockerfile", ".dockerignore", "kubernetes.yaml", "cpp/CMakeLists.txt", "cpp/main.cpp")
KEPT = ("delay_us", "threads", "runs", "memory_pattern", "memory_arena", "spinning", "max_body_mb", "max_in_flight")
"""Options that ``service.json`` carries as they are."""


def build_service(plan: Plan, stage: Stage) -> None:
    """Fill ``stage.folder``.

    Raises:
        BuildError: see :func:`packager.targets.cpu.build`.
        StorageError: a file could not be written.
    """
    options = Options.model_validate_json(plan.options)
    with storage_errors("writing the bundle"):
        place(stage, options)
        settings = settings_for(plan, stage.model, stage.goldens, options)
        write_text(stage.folder / "service.json", to_json(settings))
        own = [HOME / name for name in SHIPPED] + sorted((HOME / "service").glob("*.py"))
        modules = {file.relative_to(HOME).as_posix(): file for file in own}
        ship_loader(Path(infer.__file__), stage.folder, modules, package="packager.targets.cpu")
        write_deployment(plan, stage.folder, settings)


def place(stage: Stage, options: Options) -> None:
    """``model.onnx`` or ``model.ort``: as it is, or with its graph optimised ahead of time.

    Raises:
        BuildError: ONNX Runtime refuses the model, or this CPU is of another level than the one asked for.
    """
    ahead = optimisation(options)
    target = stage.folder / f"model.{options.format}"
    if ahead == "none":
        place_model(stage.model, stage.goldens, target)
        return
    if ahead != "portable" and infer.cpu_level() != ahead:
        raise BuildError(
            f"the graph is to be optimised for {ahead}, but this CPU is {infer.cpu_level() or 'of none of the levels'}",
            "ONNX Runtime optimises for the CPU it runs on: build on such a one, or say optimize_for = 'portable'",
        )
    optimise(stage.model, target, portable=ahead == "portable")


def settings_for(plan: Plan, model: Path, goldens: GoldenSet, options: Options) -> dict[str, object]:
    """``service.json``: how the model is run and served, and whether its rows are independent.

    Raises:
        BuildError: batching was asked for by number and the golden cases disprove it.
    """
    batch, why = batching(plan.signature, options)
    if batch:
        why = objection(model, goldens, plan.precision)
        if why and options.max_batch != "auto":
            raise BuildError(
                f"max_batch is {options.max_batch}, but the model can't be batched: {why}",
                "leave max_batch out, or give max_batch = 0",
            )
    settings: dict[str, object] = {name: getattr(options, name) for name in KEPT}
    settings["optimize_for"] = optimisation(options)
    settings["quantized"] = open_model(model).is_quantized
    settings["max_batch"] = 0 if why else batch
    settings["rows_independent"] = batch > 0 and not why
    settings["batching"] = why or "rows of the golden cases answer alike alone and together"
    return settings


def write_deployment(plan: Plan, folder: Path, settings: dict[str, object]) -> None:
    """Requirements, container, cluster and unit files, and the C++ program."""
    kind = kind_named("cpu")
    label = dns_label(plan.name, "score")
    values = {
        "label": label,
        "signature": plan.signature,
        "settings": settings,
        "file": f"model.{Options.model_validate_json(plan.options).format}",
        "ranges": {name: package.version for name, package in kind.facts.requires.python.items()},
    }
    for name in FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        write_text(folder / name, render(kind, f"cpu/{name}.j2", **values))
    write_text(folder / f"{label}.service", render(kind, "cpu/unit.service.j2", **values))
    write_text(folder / "constraints.txt", constraints(list(kind.facts.requires.python)))


def constraints(names: list[str]) -> str:
    """Exact versions of ``names`` and of all that they need here: those that the bundle is verified with."""
    from packaging.requirements import Requirement

    found: dict[str, str] = {}
    todo = [*names, "onnxruntime", "numpy", "safetensors", "uvloop"]
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found:
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # not needed on this system
            continue
        found[name] = distribution.version
        needed = [Requirement(text) for text in distribution.requires or ()]
        todo += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return "".join(f"{name}=={version}\n" for name, version in sorted(found.items()))
