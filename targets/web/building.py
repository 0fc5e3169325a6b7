"""Filling the bundle: the model (split where it must be), the runtime, and everything rendered from templates."""

from __future__ import annotations

import base64
import hashlib
import tempfile
from pathlib import Path

from packager.errors import BuildError, StorageError
from packager.files import clone_file, to_json, write_text
from packager.graph import Dim
from packager.model import Signature, TensorSpec, open_model, sha256_file
from packager.render import render
from packager.room import Kind, Plan, Stage, kind_named
from packager.targets.web.options import Options
from packager.targets.web.planning import RUNTIME_DIR, WEBGPU_FOLDER, is_split, model_file
from packager.targets.web.runtime import WEBGPU, compress, place_runtime

PAGES = ("demo/index.html", "demo/demo.js", "verify/index.html", "verify/check.js")
STATIC = (
    "verify/golden.js", "verify/compare.js", "verify/verify.js", "verify/style.css", "_headers",
    "servers/nginx.conf", "servers/apache.htaccess",
)  # fmt: skip
CODE = (".js", ".wasm")
MIN_COMPRESSED, MAX_COMPRESSED = 64 << 10, 64 << 20
"""Bytes of a model file that is compressed: smaller isn't worth a file, larger takes too long (2 s per 10 MB)."""

WORTH_IT = 0.9
ARRAYS = {
    "float32": "Float32Array", "float64": "Float64Array", "int8": "Int8Array", "int16": "Int16Array",
    "int32": "Int32Array", "int64": "BigInt64Array", "uint8": "Uint8Array", "uint16": "Uint16Array",
    "uint32": "Uint32Array", "uint64": "BigUint64Array", "bool": "Uint8Array", "float16": "Float16Data",
    "string": "readonly string[]",
}  # fmt: skip
"""TypeScript's name of what holds a dtype."""


def build_bundle(plan: Plan, stage: Stage) -> None:
    """Fill ``stage.folder``.

    Raises:
        ToolchainMissing: the runtime isn't cached and can't be fetched.
        BuildError: the runtime's files aren't the pinned ones, or the model can't be split.
        StorageError: a file can't be written.
    """
    kind, options = kind_named(plan.kind), Options.model_validate_json(plan.options)
    assert kind.templates is not None  # noqa: S101 - the templates of this room lie in the same package
    licence = (kind.templates / "runtime-licence.txt").read_text(encoding="utf-8")
    source = dict(plan.local).get(RUNTIME_DIR, "")
    place_runtime(kind.facts.pins, licence, source, stage.folder / "runtime")
    if options.webgpu:
        place_runtime(kind.facts.pins, licence, source, stage.folder / WEBGPU_FOLDER, WEBGPU)
    _place_model(stage, options)
    _write_loader(kind, plan, stage.folder, options)
    _write_pages(kind, plan, stage.folder)
    for path in (stage.folder / model_file(options), *sorted(stage.folder.glob("weights-*.bin"))):
        _precompress(path)
    write_text(stage.folder / "package.json", to_json(_package(kind, plan)))
    write_text(stage.folder / "sri.json", to_json(_integrity(stage.folder, model_file(options))))


def _place_model(stage: Stage, options: Options) -> None:
    """The model's own bytes where one file is enough, else saved anew with its weights in files of bounded size."""
    model, path = open_model(stage.model), stage.folder / model_file(options)
    if options.format == "ort":
        _save_ort(stage.model, path)
        return
    if not is_split(model, options):
        clone_file(stage.model, path)
        return
    from packager.transform import Context
    from packager.transforming import apply

    limit = options.max_file_mb << 20
    with tempfile.TemporaryDirectory(prefix="packager-web-") as name:
        work = Path(name)
        apply(
            (), Context(stage.model, work, stage.goldens), path, max_inline_bytes=limit // 2, max_file_bytes=limit,
            check_runtime=False,
        )  # fmt: skip
    for file in (path, *sorted(stage.folder.glob("weights-*.bin"))):
        if file.stat().st_size > max(limit, 1 << 30):
            raise BuildError(f"{file.name} has {file.stat().st_size} bytes, more than a browser holds in one piece")


def _precompress(path: Path) -> None:
    """Put ``.gz`` and ``.br`` beside a model or weights file that they make clearly smaller: floats seldom are."""
    size = path.stat().st_size
    if not MIN_COMPRESSED <= size <= MAX_COMPRESSED:
        return
    compress(path, path.read_bytes())
    made = [path.with_name(f"{path.name}.{end}") for end in ("gz", "br")]
    if min(file.stat().st_size for file in made) > WORTH_IT * size:
        for file in made:
            file.unlink()


def _save_ort(model: Path, target: Path) -> None:
    """Save the graph as ONNX Runtime reads it fastest: parsed, and optimised as far as any CPU takes it.

    The level is the highest that doesn't lay tensors out for the CPU that built it.

    Raises:
        BuildError: ONNX Runtime refused.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(target)
    options.add_session_config_entry("session.save_model_format", "ORT")
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise BuildError(f"ONNX Runtime can't save it as .ort: {error}", 'leave `format` at "onnx"') from error


def module_name(plan: Plan) -> str:
    """The loader's file name."""
    return f"{plan.name}.js"


def _write_loader(kind: Kind, plan: Plan, folder: Path, options: Options) -> None:
    model = model_file(options)
    external = [] if model.endswith(".ort") else [file.location for file in open_model(folder / model).external]
    module, messages = module_name(plan), f"{plan.name}.messages.js"
    loader = render(
        kind,
        f"{kind.name}/loader.js.j2",
        module=module,
        messages=messages,
        types=f"{plan.name}.d.ts",
        runtime_version=kind.facts.pins["version"],
        signature=signature_literal(plan.signature),
        wasm=_file(folder / "runtime", "ort-wasm-simd-threaded.wasm"),
        model=_file(folder, model),
        external=[_file(folder, location) for location in external],
        webgpu=_file(folder, f"{WEBGPU_FOLDER}/ort-wasm-simd-threaded.asyncify.wasm") if options.webgpu else None,
    )
    write_text(folder / module, loader)
    assert kind.templates is not None  # noqa: S101 - see above
    write_text(folder / messages, (kind.templates / "messages.js").read_text(encoding="utf-8"))
    types = render(
        kind,
        f"{kind.name}/types.d.ts.j2",
        module=module,
        model=model,
        webgpu=options.webgpu,
        inputs=[_typed(spec) for spec in plan.signature.inputs],
        outputs=[_typed(spec) for spec in plan.signature.outputs],
    )
    write_text(folder / f"{plan.name}.d.ts", types)


def signature_literal(signature: Signature) -> dict[str, list[dict[str, str | list[Dim] | None]]]:
    """The signature as the loader carries it."""
    return {
        part: [
            {"name": spec.name, "dtype": spec.dtype, "dims": None if spec.dims is None else list(spec.dims)}
            for spec in specs
        ]
        for part, specs in (("inputs", signature.inputs), ("outputs", signature.outputs))
    }


def _typed(spec: TensorSpec) -> dict[str, object]:
    """What the types say of an input or output."""
    array = ARRAYS[spec.dtype]
    element = {"int64": "bigint | number", "uint64": "bigint | number", "bool": "boolean | number", "string": "string"}
    one = element.get(spec.dtype, "number")
    listed = f"readonly ({one})[]" if " " in one else f"readonly {one}[]"
    given = listed if spec.dtype == "string" else f"{array} | {listed}"
    if spec.dims == ():
        given += f" | {one}"
    return {"name": spec.name, "dtype": spec.dtype, "dims": spec.dims, "given": given, "result": array}


def _file(folder: Path, name: str) -> dict[str, object]:
    path = folder / name
    return {"path": name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}


def _write_pages(kind: Kind, plan: Plan, folder: Path) -> None:
    assert kind.templates is not None  # noqa: S101 - see above
    for name in PAGES:
        text = render(
            kind, f"{kind.name}/{name}.j2", title=f"{plan.name} {plan.version}", module=module_name(plan),
            bundle={"name": plan.name, "version": plan.version, "target": plan.target, "kind": plan.kind},
            runtime_version=kind.facts.pins["version"],
        )  # fmt: skip
        write_text(folder / name, text)
    for name in STATIC:
        write_text(folder / name, (kind.templates / name).read_text(encoding="utf-8"))


def _package(kind: Kind, plan: Plan) -> dict[str, object]:
    module, types = f"./{module_name(plan)}", f"./{plan.name}.d.ts"
    return {
        "name": plan.name.lower(),
        "version": plan.version if _is_semver(plan.version) else "0.0.0",
        "private": True,
        "type": "module",
        "main": module,
        "types": types,
        "exports": {".": {"types": types, "default": module}, "./*": "./*"},
        "sideEffects": False,
        "config": {"onnxruntime-web": kind.facts.pins["version"]},
    }


def _is_semver(text: str) -> bool:
    """Whether npm takes it as a version (semver.org, 2.0.0)."""
    import re

    return bool(re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?", text))


def _integrity(folder: Path, model: str) -> dict[str, str]:
    """Subresource-Integrity values of scripts, WASM and model by path."""
    found: dict[str, str] = {}
    code = [path for where in ("runtime", WEBGPU_FOLDER) for path in (folder / where).glob("*") if path.suffix in CODE]
    paths = [*folder.glob("*.js"), *code, folder / model]
    for path in sorted([*paths, *folder.glob("weights-*.bin")]):
        try:
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha384").digest()
        except OSError as error:
            raise StorageError(f"{path} can't be read back: {error.strerror}") from error
        found[path.relative_to(folder).as_posix()] = f"sha384-{base64.b64encode(digest).decode()}"
    return found
