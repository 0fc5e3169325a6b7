"""An ensemble: the model with an ONNX before it, one after it, or both, which Triton serves as one model.

pre -> model -> post. Tensors are joined by name. What no step makes, the ensemble takes; what no step takes, it gives.
The bundle's own model stays as it is and is served too. The steps and the whole have golden cases of their own, in a
folder for each under ``ensemble/``, made by running the steps in sequence in ONNX Runtime; such a folder is what the
client that ships takes for a bundle, so that it can ask for the step alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packager import golden_store
from packager.bundle import signature_document
from packager.errors import BuildError, ModelError, Refused
from packager.files import to_json, write_text
from packager.golden_synth import synthesise
from packager.goldens import Array, GoldenCase, GoldenSet
from packager.model import Model, Signature, TensorSpec, open_model
from packager.parity import OutputRule
from packager.policy import judged_precision, rules_for
from packager.room import Plan
from packager.targets.triton.config import Config, Entry, given_type, printed
from packager.targets.triton.options import Options

FOLDER = "ensemble"
WHOLE = "whole"
PARTS = ("pre", "model", "post")
POLICY = "default-1"
PLACEHOLDER = "ensemble.txt"


def served_name(model: str, part: str) -> str:
    """The name in the repository of a step of a model's ensemble, or of the whole."""
    return {"model": model, WHOLE: f"{model}-ensemble"}.get(part, f"{model}-{part}")


@dataclass(frozen=True)
class Chain:
    """The steps that there are, by part, in order, and what the whole takes and gives."""

    steps: tuple[tuple[str, Signature], ...]
    whole: Signature


def chained(signatures: Mapping[str, Signature]) -> Chain:
    """Join steps by the names of their tensors.

    Raises:
        Refused: they don't fit together; every tensor at fault is named.
    """
    steps = tuple((part, signatures[part]) for part in PARTS if part in signatures)
    made: dict[str, tuple[str, TensorSpec]] = {}
    taken: dict[str, TensorSpec] = {}
    used: set[str] = set()
    wrong: list[str] = []
    for part, signature in steps:
        joined = [spec.name for spec in signature.inputs if spec.name in made]
        if made and not joined:
            wrong.append(f"{part} takes {_names(signature.inputs)}, and the steps before it make {', '.join(made)}")
        for spec in signature.inputs:
            if spec.name not in made:
                taken.setdefault(spec.name, spec)
            source, found = made.get(spec.name) or ("the ensemble", taken[spec.name])
            used.add(spec.name)
            if not _fits(found, spec):
                wrong.append(f"{part} takes {spec}, and {source} gives {found}")
        for spec in signature.outputs:
            if spec.name in made or spec.name in taken:
                wrong.append(f"{part} makes '{spec.name}', which is made or taken before it already")
            made[spec.name] = (part, spec)
    if wrong:
        raise Refused(
            "the steps of the ensemble don't fit together:" + "".join(f"\n  {line}" for line in wrong),
            "rename inputs and outputs so that each step takes what the one before it makes",
        )
    given = tuple(spec for name, (_, spec) in made.items() if name not in used)
    return Chain(steps, Signature(tuple(taken.values()), given))


def _names(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"'{spec.name}'" for spec in specs)


def _fits(made: TensorSpec, wanted: TensorSpec) -> bool:
    """Whether one tensor may be the other: type and rank are the same, and no two fixed sizes differ."""
    return (
        (made.kind, made.dtype) == (wanted.kind, wanted.dtype)
        and len(made.dims or ()) == len(wanted.dims or ())
        and all(
            one == other or not isinstance(one, int) or not isinstance(other, int)
            for one, other in zip(made.dims or (), wanted.dims or (), strict=True)
        )
    )


def step_options(options: Options) -> Options:
    """The options of a step beside the model: placed and versioned alike, and otherwise plain."""
    kept = {"max_batch", "instances", "device", "gpus", "model_version", "version_policy", "queue_delay_us"}
    return Options.model_validate({name: getattr(options, name) for name in kept})


def ensemble_text(model: str, chain: Chain, configs: Mapping[str, Config], options: Options) -> str:
    """The ensemble's ``config.pbtxt``. Its steps have one ``max_batch_size``, which is the whole's too."""
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    batch = configs["model"].max_batch
    made = ModelConfig(name=served_name(model, WHOLE), platform="ensemble", max_batch_size=batch)
    made.version_policy.specific.versions.append(options.model_version)
    known = {each.name: each for config in configs.values() for each in (*config.inputs, *config.outputs)}
    for side, specs in ((made.input, chain.whole.inputs), (made.output, chain.whole.outputs)):
        for spec in specs:
            _add(side, known[spec.name], batch > 0)
    for part, signature in chain.steps:
        step = made.ensemble_scheduling.step.add(model_name=served_name(model, part), model_version=-1)
        for spec in signature.inputs:
            step.input_map[spec.name] = spec.name
        for spec in signature.outputs:
            step.output_map[spec.name] = spec.name
    return f"# {' -> '.join(part for part, _ in chain.steps)}\n{printed(made)}"


def _add(side: Any, entry: Entry, batching: bool) -> None:  # noqa: ANN401 - a protobuf list
    dims = entry.dims[1:] if batching else entry.dims
    side.add(name=entry.name, data_type=given_type(entry), dims=dims or [1])


def first_inputs(chain: Chain, models: Mapping[str, Path], given: GoldenSet) -> GoldenSet:
    """Inputs for the whole: the model's golden ones where it comes first, else synthesised for the step that does."""
    if chain.steps[0][0] == "model":
        return given
    found: dict[str, dict[str, Array]] = {}
    for part, _ in reversed(chain.steps):
        model = open_model(models[part])
        sizes = {name: size for name, size in sizes_of(chain).items() if name in model.signature.symbols()}
        for case in synthesise(model, dims=sizes).cases:
            found.setdefault(case.name, {}).update(case.inputs)
    names = {spec.name for spec in chain.whole.inputs}
    return GoldenSet(
        tuple(
            GoldenCase(case, {name: array for name, array in arrays.items() if name in names}, {}, "synthesised")
            for case, arrays in found.items()
        )
    )


def sizes_of(chain: Chain) -> dict[str, int]:
    """Sizes of dims that are free where a tensor is made and fixed where it is taken, by the free dim's name."""
    made = {spec.name: spec for _, signature in chain.steps for spec in signature.outputs}
    return {
        free: fixed
        for _, signature in chain.steps
        for spec in signature.inputs
        if spec.name in made
        for free, fixed in zip(made[spec.name].dims or (), spec.dims or (), strict=True)
        if isinstance(free, str) and isinstance(fixed, int)
    }


def run_in_sequence(chain: Chain, models: Mapping[str, Path], inputs: GoldenSet) -> dict[str, GoldenSet]:
    """Golden cases of every step and of the whole, by ONNX Runtime.

    Raises:
        BuildError: a step doesn't run on what the one before it made.
    """
    from packager.reference import OrtSession

    sessions = {
        part: OrtSession(models[part], quantized=open_model(models[part]).is_quantized) for part, _ in chain.steps
    }
    found: dict[str, list[GoldenCase]] = {part: [] for part in (*sessions, WHOLE)}
    for case in inputs.cases:
        tensors = dict(case.inputs)
        for part, signature in chain.steps:
            feeds = {spec.name: tensors[spec.name] for spec in signature.inputs}
            try:
                outputs = sessions[part].run(feeds, [spec.name for spec in signature.outputs], case.name)
            except ModelError as error:
                raise BuildError(f"step {part} of the ensemble doesn't run: {error.message}", error.hint) from error
            found[part].append(GoldenCase(case.name, feeds, outputs, case.source))
            tensors.update(outputs)
        taken = {spec.name: tensors[spec.name] for spec in chain.whole.inputs}
        given = {spec.name: tensors[spec.name] for spec in chain.whole.outputs}
        found[WHOLE].append(GoldenCase(case.name, taken, given, case.source))
    return {part: GoldenSet(tuple(cases)) for part, cases in found.items()}


def write_steps(
    plan: Plan, folder: Path, chain: Chain, models: Mapping[str, Path], goldens: Mapping[str, GoldenSet]
) -> None:
    """A folder under ``ensemble/`` for each step but the model, which is the bundle's own, and for the whole."""
    opened = {part: open_model(models[part]) for part, _ in chain.steps}
    rules: dict[str, OutputRule] = {}
    for part, signature in chain.steps:
        own = rules_of(opened[part], plan.precision if part == "model" else "fp32")
        rules |= own
        if part != "model":
            _write(plan, folder / FOLDER / part, (part, signature), goldens[part], own)
    kept = {spec.name: rules[spec.name] for spec in chain.whole.outputs}
    _write(plan, folder / FOLDER / WHOLE, (WHOLE, chain.whole), goldens[WHOLE], kept)


def rules_of(model: Model, precision: str) -> dict[str, OutputRule]:
    """By what a step is judged."""
    return dict(rules_for(POLICY, judged_precision(model, precision), model))


def _write(
    plan: Plan, folder: Path, step: tuple[str, Signature], goldens: GoldenSet, rules: Mapping[str, OutputRule]
) -> None:
    part, signature = step
    golden_store.write(folder / "golden", goldens, rules, policy=POLICY, precision=plan.precision, excluded={})
    described = {
        "schema": "packager.step/1",
        "name": served_name(plan.name, part),
        "version": plan.version,
        "signature": signature_document(signature),
        "plan": {"options": plan.options},
    }
    write_text(folder / "bundle.json", to_json(described))
