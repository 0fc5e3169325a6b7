"""Compiling ahead of time: QNN turns the quantised model into a context binary, and says what it couldn't take.

The model goes to ONNX Runtime as bytes. From a file, the name of QNN's graph would hold a hash of the file's path, and
the same model would give other bytes in another folder. QNN runs in a folder of its own, so that whatever it writes
beside what it was asked for is thrown away.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from packager.coverage import objections
from packager.errors import BuildError, node_lines
from packager.files import clone_file, storage_errors, to_json, write_text
from packager.graph import Structure
from packager.model import open_model
from packager.render import render
from packager.room import Plan, Stage, kind_named
from packager.selfcheck import ship_loader
from packager.targets.npu import infer
from packager.targets.npu.coverage import TRACE, Coverage, read_trace, refused_in
from packager.targets.npu.culprits import culprits
from packager.targets.npu.options import Options

COVERAGE = "coverage.json"
VERBOSE = 0
"""Of ONNX Runtime's log levels."""
LOADERS = {
    "cpp/main.cpp": "main.cpp.j2",
    "cpp/CMakeLists.txt": "CMakeLists.txt.j2",
    "android/NpuModel.kt": "NpuModel.kt.j2",
}
"""Files in other languages, and their templates."""


def compile_bundle(plan: Plan, stage: Stage) -> None:
    """Fill ``stage.folder`` as the plan says.

    Raises:
        BuildError: QNN refused the model, or leaves nodes to the CPU that may not go there.
        StorageError: a file could not be written.
    """
    options = Options.model_validate_json(plan.options)
    found = covered(plan, stage)
    with storage_errors("writing the bundle"):
        clone_file(stage.model, stage.folder / infer.FALLBACK)
        write_text(stage.folder / COVERAGE, to_json(found.document()))
        write_loaders(plan, options, stage.folder)
    ship_loader(Path(infer.__file__), stage.folder)


def covered(plan: Plan, stage: Stage) -> Coverage:
    """Compile into ``stage.folder`` and say which nodes QNN took, all of them but where a fallback is allowed.

    Raises:
        BuildError: QNN refused the model, or leaves nodes to the CPU that may not go there.
    """
    model = open_model(stage.model)
    if model.external:
        raise BuildError(
            "the quantised model is larger than one file holds, which is more than an NPU's context can",
            "split the model, or choose another target",
        )
    options = Options.model_validate_json(plan.options)
    found = compiled(stage.model, stage.folder, options, model.structure)
    if found.on_cpu and not options.allow_fallback:
        nodes = objections(found.on_cpu, "fallback")
        raise BuildError(
            f"the NPU doesn't take {len(nodes)} of {found.nodes} nodes:{node_lines(nodes)}",
            "export the model without them, or set allow_fallback = true",
            nodes,
        )
    return found


def compiled(model: Path, folder: Path, options: Options, structure: Structure) -> Coverage:
    """Write the context model and its binary into ``folder``, and say which nodes QNN took.

    Raises:
        BuildError: QNN refused; nodes that it can't compile alone are named.
    """
    folder, data = folder.resolve(), model.read_bytes()
    with tempfile.TemporaryDirectory(prefix="packager-qnn-") as name:
        try:
            _compile(data, folder, options, name)
        except Exception as error:  # ONNX Runtime's exception types are not public
            named = "".join(
                f"\n  node {label}: QNN can't compile it alone either" for label in _refused(model, options)
            )
            raise BuildError(
                f"QNN can't compile the model: {infer.one_line(error)}{named}",
                "try another htp_arch or precision, or export the model without the node that it names",
            ) from error
        whole = (folder / infer.CONTEXT).is_file() and (folder / infer.BINARY).is_file()
        if whole or (Path(name) / TRACE).is_file():
            found = read_trace(Path(name), structure)
        else:
            found = Coverage(0, 0, (), refused_in(_logged(data, folder, options, name), structure))
    if not whole:
        nodes = objections(found.on_cpu, "fallback")
        raise BuildError(
            f"QNN took no node of the model, so there is no context binary{node_lines(nodes)}",
            "choose another target for this model",
            nodes,
        )
    return found


def _compile(data: bytes, folder: Path, options: Options, traces: str, severity: int = infer.FATAL) -> None:
    """Have ONNX Runtime write a context into ``folder``; QNN works, and traces which nodes it takes, in ``traces``."""
    import onnxruntime_qnn

    runtime = infer.load_runtime()
    settings = runtime.SessionOptions()
    settings.log_severity_level = severity
    for key, value in (
        ("ep.context_enable", "1"),
        ("ep.context_embed_mode", "0"),
        ("ep.context_file_path", str(folder / infer.CONTEXT)),
    ):
        settings.add_session_config_entry(key, value)
    chosen = {
        **infer.provider_options(options.model_dump(), onnxruntime_qnn.get_qnn_htp_path()),
        "htp_graph_finalization_optimization_mode": str(options.optimisation),
        "enable_framework_op_trace": "1",
        "framework_op_trace_dir": traces,
    }
    with contextlib.chdir(traces):
        settings.add_provider_for_devices([infer.find_device(runtime)], chosen)
        runtime.InferenceSession(data, settings)


def _logged(data: bytes, folder: Path, options: Options, traces: str) -> str:
    """All that is said on standard error while a model is compiled once more, in a process that is ours alone."""
    with tempfile.TemporaryFile() as log:
        kept = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            _compile(data, folder, options, traces, VERBOSE)
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        log.seek(0)
        return log.read().decode("utf-8", errors="replace")


def _refused(model: Path, options: Options) -> list[str]:
    """Nodes that QNN can't compile by themselves."""

    def compiles(data: bytes) -> bool:
        with tempfile.TemporaryDirectory(prefix="packager-qnn-") as name:
            try:
                _compile(data, Path(name), options, name)
            except Exception:  # noqa: BLE001 - ONNX Runtime's exception types are not public
                return False
            return True

    found: list[str] = culprits(model, compiles)
    return found


def write_loaders(plan: Plan, options: Options, folder: Path) -> None:
    """The loaders in C++ and Kotlin, with this model's names, shapes and settings."""
    settings = infer.provider_options(options.model_dump(), "")
    del settings["backend_path"]
    kind = kind_named(plan.kind)
    for name, template in LOADERS.items():
        text = render(
            kind, f"{plan.kind}/{template}", signature=plan.signature, settings=settings,
            allow_fallback=options.allow_fallback, maven=[kind.facts.pins[key] for key in sorted(kind.facts.pins)],
        )  # fmt: skip
        (folder / name).parent.mkdir(exist_ok=True)
        write_text(folder / name, text)
