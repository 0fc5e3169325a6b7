"""Where two forms of one model part: both run side by side, node by node.

Intermediate tensors that both models have by the same name are made extra outputs, a few at a time so that memory
stays bounded, and compared. A transform that keeps names (all of ours do) can so be followed from the first node that
differs to the outputs, and ``packager explain`` ranks nodes by what they cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from packager import parity
from packager.errors import ModelError
from packager.goldens import Array
from packager.graph import Node, read_structure
from packager.model import QUANTIZED_OPERATORS, open_model
from packager.transform_exact_int8 import exact_form

if TYPE_CHECKING:
    import onnx
    import onnxruntime as ort

FIRST_CHUNK = 8
MAX_CHUNK = 128
CHUNK_BYTES = 256 * 2**20
"""Tensors are fetched in runs of about this size; one tensor alone may be larger."""
_NO_BOUND = parity.Tolerance()


@dataclass(frozen=True)
class NodeDrift:
    """How far one output of one node is from the reference.

    ``node`` is its label, ``tensor`` the output's name, ``inputs`` the names the node reads. ``max_abs`` is the largest
    absolute difference, ``scaled`` that over the reference's largest magnitude, ``cosine`` the similarity; ``None``
    where nothing finite was compared. ``nan`` and ``inf`` count values that are so here and not in the reference.
    ``reference_max`` is the reference's largest finite magnitude. ``differs`` says what can't be compared at all
    (another shape), or how many exact values (integers, bools, strings) differ; empty otherwise.
    """

    node: str
    op_type: str
    tensor: str
    inputs: tuple[str, ...]
    max_abs: float | None
    scaled: float | None
    cosine: float | None
    nan: int
    inf: int
    reference_max: float
    differs: str = ""

    @property
    def severity(self) -> float:
        """For ranking: infinite where values are no longer finite or comparable, else the scaled error."""
        if self.nan or self.inf or (self.differs and self.scaled is None):
            return float("inf")
        return self.scaled or 0.0

    def __str__(self) -> str:
        if self.nan or self.inf:
            return f"{self.node}: {self.nan} NaN and {self.inf} infinite values the reference hasn't"
        if self.differs:
            return f"{self.node}: {self.differs}"
        return f"{self.node}: off by {self.severity:.2g} of its magnitude"


def drift(
    reference: Path,
    other: Path,
    feeds: Mapping[str, Array],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    max_chunk: int = MAX_CHUNK,
) -> tuple[NodeDrift, ...]:
    """Run two models side by side on one case; every main-graph tensor both compute, in the reference's order.

    Graph optimisation is off, but for models with integer operators, which need ``session.x64quantprecision``.

    Args:
        reference: the ONNX file that is right.
        other: another form of it; tensors of the same name are held to mean the same.
        feeds: inputs by name; floats are cast to what either model takes.
        chunk_bytes: how much to fetch at once, in bytes, estimated from what came before.
        max_chunk: how many tensors to fetch at once at most.

    Raises:
        ModelError: one of the two can't be loaded or run.
    """
    left, right = Probe(reference), Probe(other)
    common = set(right.made())
    nodes = {name: node for name, node in left.made().items() if name in common}
    names, found = list(nodes), list[NodeDrift]()
    size = min(FIRST_CHUNK, max_chunk)
    while names:
        chunk, names = names[:size], names[size:]
        expected, actual = left.run(chunk, feeds), right.run(chunk, feeds)
        for name in chunk:
            if name in expected and name in actual:
                found.append(_compare(nodes[name], name, expected[name], actual[name]))
        fetched = sum(array.nbytes for array in expected.values()) + 1
        size = max(1, min(max_chunk, size * 2, size * chunk_bytes // fetched))
    return tuple(found)


def first_diverging(drifts: Iterable[NodeDrift], scaled: float = 1e-2) -> NodeDrift | None:
    """The first tensor, in graph order, that is off by more than ``scaled`` of its magnitude or no longer finite."""
    return next((each for each in drifts if each.differs or each.severity > scaled), None)


def worst_first(drifts: Iterable[NodeDrift]) -> list[NodeDrift]:
    """Ranked by what each node adds: its error beyond that of its inputs; what isn't finite any more comes first."""
    every = list(drifts)
    added = gains(every)
    return sorted(every, key=lambda each: (added[each.tensor], each.severity), reverse=True)


def gains(drifts: Sequence[NodeDrift]) -> dict[str, float]:
    """By tensor: its severity minus the largest of its node's inputs'; not below 0, and 0 where both are infinite."""
    known = {each.tensor: each.severity for each in drifts}
    found: dict[str, float] = {}
    for each in drifts:
        inherited = max((known.get(name, 0.0) for name in each.inputs), default=0.0)
        found[each.tensor] = 0.0 if inherited == float("inf") else max(0.0, each.severity - inherited)
    return found


def load_session(model: bytes | Path, folder: Path | str, *, quantized: bool) -> ort.InferenceSession:
    """A session set for fidelity; ``folder`` is where external data lies.

    ``quantized`` models run without saturation, as in :mod:`packager.reference`: where its optimiser fails on
    QuantizeLinear and DequantizeLinear alone, they run as they are defined, in float.

    Raises:
        ModelError: ONNX Runtime refuses the model.
    """
    try:
        if isinstance(model, bytes):
            return _session(model, folder, quantized=quantized)
        with exact_form(model, quantized=quantized) as exact:
            return _session(exact, folder, quantized=quantized)
    except ModelError:
        if not quantized or isinstance(model, bytes) or open_model(model).multiplies_integers:
            raise
        return _session(model, folder, quantized=False)


def _session(model: bytes | Path, folder: Path | str, *, quantized: bool) -> ort.InferenceSession:
    import onnxruntime as ort

    ort.disable_telemetry_events()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if quantized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.add_session_config_entry("session.x64quantprecision", "1")
    if isinstance(model, bytes):
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    source = model if isinstance(model, bytes) else str(model)
    try:
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ORT's exception types are not public
        raise ModelError(f"ONNX Runtime can't load the model: {' '.join(str(error).split())[:600]}") from error


def run_session(session: ort.InferenceSession, names: list[str], feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Run once and give those outputs that are tensors; feeds are cast to the float type the session takes.

    Raises:
        ModelError: the run failed.
    """
    wanted: dict[str, np.dtype[np.generic]] = {
        "tensor(float16)": np.dtype(np.float16),
        "tensor(float)": np.dtype(np.float32),
    }
    given: dict[str, Array] = {}
    for spec in session.get_inputs():
        array = feeds.get(spec.name)
        if array is not None:
            target = wanted.get(spec.type)
            given[spec.name] = array.astype(target) if target is not None and array.dtype != target else array
    try:
        values = session.run(names, given)
    except Exception as error:  # ORT's exception types are not public
        raise ModelError(f"ONNX Runtime can't run the model: {' '.join(str(error).split())[:600]}") from error
    return {
        name: np.asarray(value)
        for name, value in zip(names, values, strict=True)
        if isinstance(value, (np.ndarray, np.generic))
    }


class Probe:
    """A model whose intermediate tensors can be asked for."""

    def __init__(self, path: Path) -> None:
        import onnx

        self._folder = path.parent.absolute()
        data = path.read_bytes()
        self._structure = read_structure(data, len(data))
        self._proto: onnx.ModelProto = onnx.ModelProto.FromString(data)
        self._quantized = any(node.op_type in QUANTIZED_OPERATORS for node in self._structure.walk())

    def made(self) -> dict[str, Node]:
        """Tensors that nodes of the main graph make, constants left out."""
        return {
            name: node
            for node in self._structure.graph.nodes
            if node.op_type != "Constant"
            for name in node.outputs
            if name
        }

    def run(self, names: list[str], feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once and give the named tensors, inputs of the graph and intermediate ones too.

        Raises:
            ModelError: ONNX Runtime refuses the model, or the run failed.
        """
        from onnx import helper

        kept = list(self._proto.graph.output)
        del self._proto.graph.output[:]
        declared = {value.name: value for value in kept}
        self._proto.graph.output.extend(
            declared.get(name) or helper.make_empty_tensor_value_info(name) for name in names
        )
        data = self._proto.SerializeToString()
        del self._proto.graph.output[:]
        self._proto.graph.output.extend(kept)
        return run_session(load_session(data, self._folder, quantized=self._quantized), names, feeds)


def as_dtype(actual: Array, expected: Array) -> Array:
    """A float array in the dtype of what it is compared with; others as they are."""
    floats = actual.dtype.kind in "fV" and expected.dtype.kind == "f"
    return actual.astype(expected.dtype) if floats and actual.dtype != expected.dtype else actual


def _compare(node: Node, name: str, expected: Array, actual: Array) -> NodeDrift:
    if expected.dtype.kind == "f" and actual.dtype.kind == "f" and expected.dtype.itemsize < actual.dtype.itemsize:
        expected = expected.astype(actual.dtype)
    result = parity.compare_output(name, expected, as_dtype(actual, expected), _NO_BOUND)
    metrics = result.metrics
    differs = ""
    if metrics is None or metrics.expected_shape != metrics.actual_shape or metrics.mismatches:
        differs = result.reasons[0] if result.reasons else "differs"
    elif metrics.expected_dtype != metrics.actual_dtype:
        differs = result.reasons[0]
    finite = expected[np.isfinite(expected)] if expected.dtype.kind == "f" else np.zeros(0)
    nan = inf = 0
    if expected.dtype.kind == "f" and expected.shape == actual.shape and actual.dtype.kind == "f":
        nan = int(np.count_nonzero(np.isnan(actual) & ~np.isnan(expected)))
        inf = int(np.count_nonzero(np.isinf(actual) & ~np.isinf(expected)))
    return NodeDrift(
        node=node.label,
        op_type=node.op_type,
        tensor=name,
        inputs=tuple(one for one in node.inputs if one),
        max_abs=None if metrics is None else metrics.max_abs,
        scaled=None if metrics is None else metrics.scaled,
        cosine=None if metrics is None else metrics.cosine,
        nan=nan,
        inf=inf,
        reference_max=float(np.abs(finite).max(initial=0.0)),
        differs=differs,
    )
