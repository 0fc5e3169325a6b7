"""Building: the model repository, its configuration, the client, and what deploys and measures it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from packager.errors import BuildError, ModelError, StorageError
from packager.files import clone_file, write_text
from packager.goldens import Array, dtype_name
from packager.model import Signature, open_model
from packager.names import dns_label
from packager.render import render
from packager.room import Plan, Stage, kind_named
from packager.rows import objection
from packager.selfcheck import ship_loader
from packager.targets.triton import ensemble, infer
from packager.targets.triton.config import DTYPES, MODEL_FILE, Config, Entry, WarmUp, config_text
from packager.targets.triton.options import Options
from packager.targets.triton.planning import batching, flags
from packager.transforming import loaded_in_runtime, place_model

REPOSITORY = "model_repository"
CONFIG = "config.pbtxt"
MAX_PERF_ELEMENTS = 1 << 20
"""Elements of a golden case that ``perf.json`` may hold as text."""


def build_repository(plan: Plan, stage: Stage) -> None:
    """Fill ``stage.folder``.

    Raises:
        BuildError: batching was asked for and can't be proven, or ONNX Runtime and the plan see different tensors.
        StorageError: a file could not be written.
    """
    options = Options.model_validate_json(plan.options)
    home = stage.folder / REPOSITORY / plan.name
    folder = home / str(options.model_version)
    try:
        folder.mkdir(parents=True)
        place_model(stage.model, stage.goldens, folder / MODEL_FILE)
        config = configure(plan, stage, folder / MODEL_FILE, options)
        if options.steps():
            config = build_ensemble(plan, stage, config, folder / MODEL_FILE)
        first = stage.goldens.cases[0].inputs
        if options.warm_up and all(array.size for array in first.values()):  # a warm-up can't have dims of 0
            config = warmed_up(config, first, home)
        config = labelled(config, home)
        write_text(home / CONFIG, config_text(config))
        ship_loader(Path(infer.__file__), stage.folder)
    except OSError as error:
        raise StorageError(f"{error.filename or home} can't be written: {error.strerror}") from error
    write_deployment(plan, stage, config)


def build_ensemble(plan: Plan, stage: Stage, config: Config, placed: Path) -> Config:
    """The steps beside the model, the ensemble itself, and golden cases of each.

    Requests are batched where all steps can be, so that rows stay together from the first to the last.

    Args:
        plan: of the target.
        stage: where the bundle is built.
        config: of the model alone.
        placed: the model's file in the repository.

    Returns:
        The model's configuration, not batched where another step can't be.

    Raises:
        BuildError: a step doesn't run on what the one before it makes.
    """
    options = config.options
    models = {"model": placed, **{part: stage.files[name] for part, name in options.steps().items()}}
    signatures = {part: open_model(path).signature for part, path in models.items()}
    chain = ensemble.chained({**signatures, "model": plan.signature})
    goldens = ensemble.run_in_sequence(chain, models, ensemble.first_inputs(chain, models, stage.goldens))
    configs = {"model": config}
    for part in options.steps():
        name = ensemble.served_name(plan.name, part)
        step = replace(plan, name=name, signature=signatures[part], precision="fp32")
        own = ensemble.step_options(options)
        configs[part] = configure(step, replace(stage, goldens=goldens[part]), models[part], own)
    configs = batched_alike(configs)
    repository = stage.folder / REPOSITORY
    for part in options.steps():
        home = repository / ensemble.served_name(plan.name, part)
        folder = home / str(options.model_version)
        folder.mkdir(parents=True)
        clone_file(models[part], folder / MODEL_FILE)
        write_text(home / CONFIG, config_text(configs[part]))
    whole = repository / ensemble.served_name(plan.name, ensemble.WHOLE)
    (whole / str(options.model_version)).mkdir(parents=True)
    # Triton wants the folder of a version even where there is no file for it, and archives and git drop empty ones.
    write_text(whole / str(options.model_version) / ensemble.PLACEHOLDER, "An ensemble has no file of its own.\n")
    write_text(whole / CONFIG, ensemble.ensemble_text(plan.name, chain, configs, options))
    ensemble.write_steps(plan, stage.folder, chain, models, goldens)
    return configs["model"]


def batched_alike(configs: Mapping[str, Config]) -> dict[str, Config]:
    """The configurations of all steps, none of which batches requests where one can't."""
    alone = next((each.name for each in configs.values() if not each.max_batch), None)
    if alone is None:
        return dict(configs)
    why = f"Requests aren't batched: those of '{alone}' in the same ensemble aren't"
    return {part: replace(each, max_batch=0, why=why) if each.max_batch else each for part, each in configs.items()}


def configure(plan: Plan, stage: Stage, model: Path, options: Options) -> Config:
    """The configuration: names and types of the signature, dims as ONNX Runtime sees them, batching if proven.

    Raises:
        BuildError: batching was asked for by number and the golden cases disprove it.
    """
    inputs, outputs = entries(model, plan.signature)
    batch, why = batching(plan.signature, options)
    if batch:
        fixed = next((entry for entry in (*inputs, *outputs) if not entry.dims or entry.dims[0] != -1), None)
        why = objection(model, stage.goldens, plan.precision)
        if fixed is not None:
            why = f"ONNX Runtime finds dims {list(fixed.dims)} for '{fixed.name}', so its first is not free"
        if why and options.max_batch != "auto":
            raise BuildError(
                f"max_batch is {options.max_batch}, but the model can't be batched: {why}",
                "leave max_batch out, or give max_batch = 0",
            )
    if why:
        return Config(plan.name, inputs, outputs, 0, f"Requests aren't batched: {why}", options)
    told = "Batched: rows of the golden cases answer alike alone and together."
    return Config(plan.name, inputs, outputs, batch, told, options)


def entries(model: Path, signature: Signature) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    """Inputs and outputs with the dims that ONNX Runtime gives them, which the backend compares exactly.

    Raises:
        BuildError: ONNX Runtime doesn't load the model, or gives a tensor no rank where the signature has one.
    """
    try:
        session = loaded_in_runtime(model)
    except ModelError as error:
        raise BuildError(error.message, error.hint) from error
    found = {each.name: each for each in (*session.get_inputs(), *session.get_outputs())}
    sides = []
    for specs, names in (
        (signature.inputs, [each.name for each in session.get_inputs()]),
        (signature.outputs, [each.name for each in session.get_outputs()]),
    ):
        if sorted(names) != sorted(spec.name for spec in specs):
            raise BuildError(f"ONNX Runtime finds the tensors {names}, the model has {[spec.name for spec in specs]}")
        made = []
        for spec in specs:
            dims = tuple(dim if isinstance(dim, int) else -1 for dim in found[spec.name].shape)
            if len(dims) != len(spec.dims or ()):
                raise BuildError(f"'{spec.name}' has {len(spec.dims or ())} dims, ONNX Runtime finds {list(dims)}")
            made.append(Entry(spec.name, DTYPES[spec.dtype], dims))
        sides.append(tuple(made))
    return sides[0], sides[1]


def warmed_up(config: Config, inputs: Mapping[str, Array], home: Path) -> Config:
    """The configuration with the first golden case, or its first row, as a warm-up, whose bytes are put in ``home``."""
    from tritonclient.utils import serialize_byte_tensor

    folder, found = home / "warmup", []
    folder.mkdir()
    for index, entry in enumerate(config.inputs):
        row = sent_row(inputs[entry.name], config)
        data = row.tobytes()
        if row.dtype == object:
            flat = np.array([str(each).encode("utf-8") for each in row.ravel()], object)
            data = b"".join(serialize_byte_tensor(flat).ravel()) if row.size else b""
        (folder / f"input-{index}").write_bytes(data)
        found.append(WarmUp(entry, row.shape, f"input-{index}"))
    return replace(config, warm_up=tuple(found))


def labelled(config: Config, home: Path) -> Config:
    """The configuration with a file of labels, put in ``home``, for every output that has some."""
    outputs = []
    for index, entry in enumerate(config.outputs):
        labels = config.options.labels.get(entry.name)
        if labels:
            file = f"labels-{index}.txt"
            write_text(home / file, "".join(f"{label}\n" for label in labels))
            entry = replace(entry, labels=file)  # noqa: PLW2901
        outputs.append(entry)
    return replace(config, outputs=tuple(outputs))


def sent_row(array: Array, config: Config) -> Array:
    """A case's array as one request sends it, without the batch dim: Triton has no empty shapes."""
    row = array[0] if config.max_batch else array
    return np.ascontiguousarray(np.asarray(row, array.dtype).reshape(np.shape(row) or (1,)))


def write_deployment(plan: Plan, stage: Stage, config: Config) -> None:
    """``compose.yaml``, ``kubernetes.yaml`` and ``perf.sh`` with its data."""
    kind = kind_named("triton")
    values = {
        "models": [plan.name, *([ensemble.served_name(plan.name, ensemble.WHOLE)] if config.options.steps() else [])],
        "label": dns_label(plan.name, "triton"),
        "release": kind.facts.pins["release"],
        "gpu": config.options.device != "cpu",
        "flags": flags(config.options),
    }
    for name in ("compose.yaml", "kubernetes.yaml"):
        write_text(stage.folder / name, render(kind, f"triton/{name}.j2", **values))
    data = perf_data(stage.goldens.cases[0].inputs, config)
    if data is not None:
        write_text(stage.folder / "perf.json", data)
    write_text(
        stage.folder / "perf.sh",
        render(kind, "triton/perf.sh.j2", model=shlex.quote(plan.name), version=config.options.model_version,
               data=data is not None, batch=1, shapes=[shlex.quote(shape) for shape in _shapes(stage, config)]),
    )  # fmt: skip


def perf_data(inputs: Mapping[str, Array], config: Config) -> str | None:
    """The first golden case as perf_analyzer's JSON; ``None`` where it is too large for text."""
    if sum(array.size for array in inputs.values()) > MAX_PERF_ELEMENTS:
        return None
    step = {}
    for entry in config.inputs:
        array = inputs[entry.name]
        row = sent_row(array, config)
        if dtype_name(row) == "bool":
            row = row.astype("uint8")
        content = [str(each) for each in row.ravel()] if dtype_name(row) == "string" else row.ravel().tolist()
        step[entry.name] = {"content": content, "shape": list(row.shape)}
    try:
        return json.dumps({"data": [step]}, allow_nan=False, ensure_ascii=True) + "\n"
    except ValueError:
        return None


def _shapes(stage: Stage, config: Config) -> list[str]:
    """``name:3,224,224`` of every input with free dims, as perf_analyzer wants them."""
    found = []
    for entry in config.inputs:
        shape = stage.goldens.cases[0].inputs[entry.name].shape
        given, dims = (shape[1:], entry.dims[1:]) if config.max_batch else (shape, entry.dims)
        if -1 in dims:
            found.append(f"{entry.name}:{','.join(str(size) for size in given)}")
    return found
