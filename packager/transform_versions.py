"""Versions: the operator sets and the IR version a target's runtime takes, reached exactly or refused by name.

A number may be set freely where no used operator changed between the two versions. Where one did, its node crosses
each change by a rule of :mod:`packager.transform_steps`; an operator that begins later is expanded by ONNX's own
definition of it (:mod:`packager.transform_expanding`). Where there is neither, the model is refused with the node, the
operator and the version it changed at. (onnx's own converter raises and lowers too, but drops what it
doesn't know without a word; onnxscript's raises from opset 18 only and skips nodes it can't convert.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from packager.errors import Objection, Refused, node_lines
from packager.graph import DTYPES, Structure
from packager.model import Signature
from packager.room import Step
from packager.transform import Context, Outcome
from packager.transform_edit import Edit, Impossible
from packager.transform_expanding import expand
from packager.transform_graphs import all_names, label
from packager.transform_inference import infer
from packager.transform_ir_version import set_ir_version
from packager.transform_steps import DOWN, LOWEST, MOVED, REFUSED, REVIEWED, UP

if TYPE_CHECKING:
    import onnx.defs
    import onnx_ir
    import onnx_ir as ir

TYPE_NAMES: Mapping[str, str] = {"float32": "float", "float64": "double"}
"""ONNX's spelling of dtypes in type constraints, where it differs from ours."""

SHOWN = 8
"""Nodes listed in a refusal."""


@dataclass(frozen=True)
class SetVersions:
    """Set operator-set versions by domain (``""`` is ai.onnx) and, unless ``None``, the IR version.

    Before: every used operator exists at both versions, or has an exact equivalent. After: the model means the same
    and its signature is the same. Domains that aren't imported are left out.
    """

    opsets: tuple[tuple[str, int], ...]
    ir: int | None = None
    name: Literal["set-versions"] = "set-versions"

    def step(self) -> Step:
        """The line of the plan."""
        wanted = [(domain or "ai.onnx", str(version)) for domain, version in self.opsets]
        return Step("Setting versions", (*wanted, *([("IR", str(self.ir))] if self.ir is not None else [])))

    def signature(self, before: Signature) -> Signature:
        """Unchanged."""
        return before

    def run(self, model: onnx_ir.Model, context: Context) -> Outcome:
        """Convert each domain, then the IR version.

        Raises:
            Refused: nodes, operators and versions are named.
        """
        notes: list[str] = []
        for domain, version in self.opsets:
            current = model.opset_imports.get(domain)
            if current is None or current == version:
                continue
            starts: dict[onnx_ir.Node, int] = {}
            if not domain and version < current:
                starts, expanded = _expanded(model, version)
                notes.extend(expanded)
            converted = _convert(model, domain, current, version, starts)
            for holder in (model.graph, *model.functions.values()):
                if domain in holder.opset_imports:
                    holder.opset_imports[domain] = version
            how = f", {converted} nodes rewritten" if converted else ""
            notes.append(f"operator set {domain or 'ai.onnx'} went from {current} to {version}{how}")
        if self.ir is not None and self.ir != model.ir_version:
            notes.append(f"IR version went from {model.ir_version} to {self.ir}")
            set_ir_version(model, self.ir)
        return Outcome(model, tuple(notes))


@dataclass(frozen=True)
class InlineFunctions:
    """Replace calls of model-local functions by their bodies; the functions go. The signature stays the same."""

    name: Literal["inline-functions"] = "inline-functions"

    def step(self) -> Step:
        """The line of the plan."""
        return Step("Inlining functions")

    def signature(self, before: Signature) -> Signature:
        """Unchanged."""
        return before

    def run(self, model: ir.Model, context: Context) -> Outcome:
        """Inline all.

        Raises:
            Refused: functions call each other in a circle, or use another version of an operator set than the model.
        """
        from onnx_ir import passes
        from onnx_ir.passes import common

        count = len(model.functions)
        if not count:
            return Outcome(model)
        try:
            common.InlinePass()(model)
        except (passes.PassError, ValueError) as error:
            reason = error.__cause__ or error
            raise Refused(
                f"local functions can't be inlined: {reason}", "export the model without local functions"
            ) from error
        return Outcome(model, (f"{count} local functions were inlined",))


@dataclass(frozen=True)
class DropUnusedImports:
    """Drop imports of operator sets that no node uses; ai.onnx stays, since ONNX wants it. The signature stays."""

    name: Literal["drop-unused-imports"] = "drop-unused-imports"

    def step(self) -> Step:
        """The line of the plan."""
        return Step("Dropping unused imports")

    def signature(self, before: Signature) -> Signature:
        """Unchanged."""
        return before

    def run(self, model: ir.Model, context: Context) -> Outcome:
        """Drop them, in the model and in its local functions."""
        notes: list[str] = []
        used = {node.domain for node in _nodes(model)} | {""}
        for domain in sorted(set(model.opset_imports) - used):
            del model.opset_imports[domain]
            notes.append(f"the unused import of operator set {domain} was dropped")
        for function in model.functions.values():
            inside = {node.domain for node in function.all_nodes()} | {""}
            for domain in set(function.opset_imports) - inside:
                del function.opset_imports[domain]
        return Outcome(model, tuple(notes))


def planned_versions(structure: Structure, limits: Mapping[str, int], ir: int | None) -> SetVersions | None:
    """What must be lowered for a runtime that takes at most ``limits`` by domain and ``ir``; ``None`` for nothing.

    Args:
        structure: the model's.
        limits: highest version per domain; ``ai.onnx`` and ``""`` both mean the default one. Others are free.
        ir: highest IR version, or ``None``.
    """
    bounds = {("" if domain == "ai.onnx" else domain): version for domain, version in limits.items()}
    opsets = tuple(
        (domain, bounds[domain]) for domain, version in structure.opsets if version > bounds.get(domain, version)
    )
    lowered = ir if ir is not None and structure.ir_version > ir else None
    return SetVersions(opsets, lowered) if opsets or lowered is not None else None


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


@lru_cache(maxsize=4096)
def schema_at(op_type: str, domain: str, version: int) -> onnx.defs.OpSchema | None:
    """The operator's schema at an operator-set version; ``None`` where it doesn't exist there, or no more."""
    import onnx.defs

    try:
        schema = onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return None
    return None if schema.deprecated else schema


@lru_cache(maxsize=1024)
def changes(op_type: str, domain: str) -> tuple[int, ...]:
    """Versions of the domain at which the operator changed (or began, or ended), ascending."""
    import onnx.defs

    history = onnx.defs.get_all_schemas_with_history()
    return tuple(sorted({item.since_version for item in history if (item.name, item.domain) == (op_type, domain)}))


def _expanded(model: ir.Model, version: int) -> tuple[dict[ir.Node, int], tuple[str, ...]]:
    """Expand what has no form at the version; gives the new nodes with what they are written for, and notes."""
    try:
        starts, labels = expand(model, version, lambda op_type: _ends(op_type, version))
    except Impossible as reason:
        raise Refused(
            f"no exact conversion of operator set ai.onnx to {version}: {reason}",
            f"export the model at operator set {version}",
        ) from None
    if not labels:
        return starts, ()
    more = f" and {len(labels) - SHOWN} more" if len(labels) > SHOWN else ""
    return starts, (f"expanded by ONNX's own definition: {', '.join(labels[:SHOWN])}{more}",)


def _ends(op_type: str, version: int) -> bool:
    """Whether a known operator has no form at the version."""
    return bool(changes(op_type, "")) and schema_at(op_type, "", version) is None


def _convert(model: ir.Model, domain: str, current: int, version: int, starts: Mapping[ir.Node, int]) -> int:
    """Take every node of the domain from its version to the other; gives how many had to be rewritten.

    Nodes are of version ``current``, but for those in ``starts``.
    """
    problems: list[Objection] = []
    rewritten = 0
    edit: Edit | None = None
    inside = {node for function in model.functions.values() for node in function.all_nodes()}
    for node in list(_nodes(model)):
        if node.domain != domain or node.op_identifier() in model.functions:
            continue
        try:
            start = starts.get(node, current)
            crossed = _crossed(node, start, version)
            if not crossed:
                continue
            if edit is None:
                edit = Edit(infer(model), all_names(model))
            if node in inside:
                raise Impossible("it is inside a local function (inline functions first)")
            before = _fingerprint(node)
            for change in crossed:
                _cross(node, change, edit, up=version > start)
            rewritten += before != _fingerprint(node)
        except Impossible as reason:
            problems.append(Objection(label(node), str(reason)))
    if problems:
        more = f"\n  ... and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise Refused(
            f"no exact conversion of operator set {domain or 'ai.onnx'} from {current} to {version}:"
            f"{node_lines(problems[:SHOWN])}{more}",
            f"export the model at operator set {version}",
            problems,
        )
    return rewritten


def _fingerprint(node: ir.Node) -> tuple[object, ...]:
    return (node.op_type, tuple(node.inputs), tuple(node.attributes.items()), len(node.outputs))


def _crossed(node: ir.Node, current: int, version: int) -> list[int]:
    """Changes of the node's operator between the versions, in the order they are crossed.

    Raises:
        Impossible: the operator isn't there at the new version, or a change lies outside what has been reviewed.
    """
    known = changes(node.op_type, node.domain)
    if not known:
        raise Impossible("the operator isn't known")
    low, high = sorted((current, version))
    between = [change for change in known if low < change <= high]
    if not between:
        return []
    first, last = REVIEWED.get(node.domain, (0, 0))
    outside = [change for change in between if not first < change <= last]
    if outside:
        raise Impossible(f"the operator changed at {outside[0]}, which packager doesn't know how to cross")
    heir = MOVED.get((node.op_type, between[-1])) if node.domain == "" else None
    if heir is not None and version > current:
        return [*between, *(change for change in changes(heir, "") if between[-1] < change <= high)]
    if schema_at(node.op_type, node.domain, version) is None:
        ended = f"ends at {between[-1]}" if version > current else f"has no usable form at {version}"
        raise Impossible(f"the operator begins at {known[0]}" if version < known[0] else f"the operator {ended}")
    if version > current:
        return between
    if between[0] <= LOWEST and node.domain == "":
        raise Impossible(f"the operator changed at {between[0]}; nothing is lowered across changes up to {LOWEST}")
    return between[::-1]


def _cross(node: ir.Node, change: int, edit: Edit, *, up: bool) -> None:
    """Cross one change of the node's operator; ``change`` is the version it happened at."""
    key = (node.op_type, change)
    reason = REFUSED.get(key) if node.domain == "" else None
    if reason is not None:
        raise Impossible(f"the operator changed at {change}: {reason}")
    if any(attribute.is_ref() for attribute in node.attributes.values()):
        raise Impossible("it takes attributes from a local function's caller")
    if node.domain == "" and key in MOVED:
        node.op_type = MOVED[key]
        return
    adapter = (UP if up else DOWN).get(key) if node.domain == "" else None
    try:
        if adapter is not None:
            adapter(node, edit)
        if schema_at(node.op_type, node.domain, change if up else change - 1) is not None:
            _general(node, change, edit, up=up)
    except Impossible as error:
        raise Impossible(f"the operator changed at {change}: {error}") from None


def _general(node: ir.Node, change: int, edit: Edit, *, up: bool) -> None:
    """The rule for changes that only add: what the other version lacks must be absent or at its default.

    Raises:
        Impossible: an attribute, input, output or dtype has no place in the other version.
    """
    old, new = schema_at(node.op_type, node.domain, change - 1), schema_at(node.op_type, node.domain, change)
    source, target = (old, new) if up else (new, old)
    if target is None:
        raise Impossible("the operator isn't there")
    for name, attribute in list(node.attributes.items()):
        if name in target.attributes or not source or name not in source.attributes:
            continue
        if _default(source, name) != attribute.value:
            raise Impossible(f"its attribute {name} = {attribute.value} can't be said there")
        del node.attributes[name]
    for name in source.attributes if source else ():
        default = _default(source, name)
        if name in target.attributes and name not in node.attributes and default != _default(target, name):
            if default is None:
                raise Impossible(f"the default of its attribute {name} changed")
            node.attributes.update({item.name: item for item in _attributes({name: default})})
    for name, wanted in target.attributes.items():
        if wanted.required and name not in node.attributes:
            raise Impossible(f"it needs an attribute {name} there")
    if not target.min_input <= len(node.inputs) <= target.max_input or len(node.outputs) > target.max_output:
        raise Impossible("its inputs or outputs have no place there")
    for values, formals in ((node.inputs, target.inputs), (node.outputs, target.outputs)):
        for index, value in enumerate(values):
            _check_dtype(value, formals[min(index, len(formals) - 1)], target, edit)


def _default(schema: onnx.defs.OpSchema, name: str) -> Any:  # noqa: ANN401
    import onnx

    value = schema.attributes[name].default_value
    if not value.type:
        return None
    found = onnx.helper.get_attribute_value(value)
    return found.decode() if isinstance(found, bytes) else found


def _attributes(values: dict[str, Any]) -> list[ir.Attr]:
    import onnx_ir as ir

    return list(ir.convenience.convert_attributes(values))


def _check_dtype(value: ir.Value | None, formal: Any, schema: onnx.defs.OpSchema, edit: Edit) -> None:  # noqa: ANN401
    spelled = "" if value is None else _spelled(value, edit)
    if value is None or not spelled:
        return  # what isn't known is checked when ONNX Runtime loads the result
    allowed = next(
        (item.allowed_type_strs for item in schema.type_constraints if item.type_param_str == formal.type_str),
        [formal.type_str],
    )
    if spelled not in allowed:
        raise Impossible(f"it doesn't take {spelled} there ('{value.name}')")


def _spelled(value: ir.Value, edit: Edit) -> str:
    """The value's type as type constraints spell it, empty where it isn't known."""
    import onnx_ir as ir

    dtype = edit.dtype(value)
    if dtype:
        return f"tensor({TYPE_NAMES.get(dtype, dtype)})"
    wraps, kind = [], value.type
    while isinstance(kind, (ir.SequenceType, ir.OptionalType)):
        wraps.append("seq(" if isinstance(kind, ir.SequenceType) else "optional(")
        kind = kind.elem_type
    if not wraps or not isinstance(kind, ir.TensorType):
        return ""
    inner = DTYPES.get(int(kind.dtype), "")
    return "".join(wraps) + f"tensor({TYPE_NAMES.get(inner, inner)})" + ")" * len(wraps)


__all__ = ["DropUnusedImports", "InlineFunctions", "SetVersions", "planned_versions"]
