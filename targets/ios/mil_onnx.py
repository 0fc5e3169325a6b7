"""An ML Program as an ONNX model: every operation by its definition, so that ONNX Runtime can carry it out here.

This is a check of a conversion, not of a device: what is run are the operations and weights that were saved, each in
the dtype it was saved in. The definitions are coremltools' own (``coremltools.converters.mil.mil.ops.defs``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from packager.goldens import Array
from packager.targets.ios.mil_program import MalformedProgram, Operation, Program

if TYPE_CHECKING:
    import onnx

OPSET = 20
IR_VERSION = 9


class Untranslated(Exception):
    """The program can't be carried out here; the text says which operation, setting or value it is about."""


class Call:
    """One operation while it is translated: its arguments, and what to write."""

    def __init__(self, model: Translation, operation: Operation) -> None:
        """Work on ``operation`` of ``model``."""
        self._model, self.operation = model, operation

    def has(self, key: str) -> bool:
        """Whether the argument is given."""
        return bool(self.operation.arguments.get(key))

    def name(self, key: str) -> str:
        """The ONNX value of an argument.

        Raises:
            Untranslated: it isn't given.
        """
        return self.names(key)[0]

    def names(self, key: str) -> list[str]:
        """The ONNX values of an argument that is a list.

        Raises:
            Untranslated: it isn't given.
        """
        if not self.has(key):
            raise Untranslated(f"operation {self.operation.type} has no {key}")
        return [self._model.value(name) for name in self.operation.arguments[key]]

    def constant(self, key: str, default: object = None) -> Array:
        """A constant argument's array.

        Raises:
            Untranslated: it is computed, or neither given nor defaulted.
        """
        if not self.has(key):
            if default is None:
                raise Untranslated(f"operation {self.operation.type} has no {key}")
            return np.asarray(default)
        (name,) = self.operation.arguments[key]
        if name not in self._model.program.constants:
            raise Untranslated(f"operation {self.operation.type} has a {key} that is computed")
        found: Array = self._model.program.constants[name]
        return found

    def integers(self, key: str, default: object = None) -> list[int]:
        """A constant argument as whole numbers."""
        return [int(number) for number in self.constant(key, default).reshape(-1)]

    def integer(self, key: str, default: int | None = None) -> int:
        """A constant argument as one whole number."""
        return self.integers(key, default)[0]

    def number(self, key: str, default: float | None = None) -> float:
        """A constant argument as one number."""
        return float(self.constant(key, default).reshape(-1)[0])

    def text(self, key: str, default: str) -> str:
        """A constant argument as a text."""
        return str(self.constant(key, default).reshape(-1)[0])

    def flag(self, key: str, default: bool = False) -> bool:
        """A constant argument as a truth value."""
        return bool(self.constant(key, default).reshape(-1)[0])

    def dims(self, key: str) -> tuple[int, ...]:
        """Sizes of an argument."""
        return self._model.dims(self.operation.arguments[key][0])

    def dtype(self, key: str) -> str:
        """The dtype of an argument."""
        return self._model.dtype(self.operation.arguments[key][0])

    def literal(self, values: object, dtype: str) -> str:
        """A new constant."""
        return self._model.literal(np.asarray(values, dtype=dtype))

    def step(self, op_type: str, inputs: list[str], count: int = 1, **attributes: object) -> str:
        """An ONNX node in between; gives the name of its (first) output."""
        outputs = [self._model.fresh() for _ in range(count)]
        self._model.node(op_type, inputs, outputs, attributes)
        return outputs[0]

    def give(self, op_type: str, inputs: list[str], **attributes: object) -> None:
        """The ONNX node that makes the operation's outputs."""
        self._model.node(op_type, inputs, [each.name for each in self.operation.outputs], attributes)

    def give_as(self, dtype: str, value: str) -> None:
        """The operation's output is ``value``, cast."""
        self.give("Cast", [value], to=self._model.code(dtype))


Rule = Callable[[Call], None]


class Translation:
    """The ONNX model while it is made."""

    def __init__(self, program: Program) -> None:
        """Start with the program's inputs."""
        self.program = program
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self._count = 0
        self._known = {each.name: each for each in program.inputs}

    def value(self, name: str) -> str:
        """The ONNX name of a value; a constant is written when it is first used."""
        if name in self.program.constants and name not in self._constants:
            from onnx import numpy_helper

            self._constants[name] = numpy_helper.from_array(np.array(self.program.constants[name]), name)
        return name

    def dims(self, name: str) -> tuple[int, ...]:
        """A value's sizes."""
        constant = self.program.constants.get(name)
        return tuple(constant.shape) if constant is not None else self._known[name].dims

    def dtype(self, name: str) -> str:
        """A value's dtype."""
        constant = self.program.constants.get(name)
        found: str = constant.dtype.name if constant is not None else self._known[name].dtype
        return found

    def fresh(self) -> str:
        """A name nobody uses: no name of a program has a space."""
        self._count += 1
        return f"step {self._count}"

    def literal(self, array: Array) -> str:
        """A new constant's name."""
        from onnx import numpy_helper

        name = self.fresh()
        self._constants[name] = numpy_helper.from_array(array, name)
        return name

    def code(self, dtype: str) -> int:
        """ONNX's number of a dtype."""
        from onnx import helper

        return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def node(self, op_type: str, inputs: list[str], outputs: list[str], attributes: dict[str, object]) -> None:
        """Write a node."""
        from onnx import helper

        self._nodes.append(helper.make_node(op_type, inputs, outputs, **attributes))

    def add(self, operation: Operation, rules: dict[str, Rule]) -> None:
        """Translate one operation.

        Raises:
            Untranslated: there is no rule for it, or not for its settings.
        """
        rule = rules.get(operation.type)
        if rule is None:
            raise Untranslated(f"operation {operation.type} has no translation")
        rule(Call(self, operation))
        self._known |= {each.name: each for each in operation.outputs}

    def model(self) -> onnx.ModelProto:
        """The finished model."""
        from onnx import helper

        inputs = [helper.make_tensor_value_info(e.name, self.code(e.dtype), e.dims) for e in self.program.inputs]
        names = [self.value(each.name) for each in self.program.outputs]
        outputs = [helper.make_tensor_value_info(name, self.code(self.dtype(name)), self.dims(name)) for name in names]
        graph = helper.make_graph(self._nodes, "program", inputs, outputs, list(self._constants.values()))
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
        proto.ir_version = IR_VERSION
        return proto


def translate(program: Program) -> onnx.ModelProto:
    """The program as ONNX.

    Raises:
        Untranslated: an operation has no translation.
        MalformedProgram: it uses what it doesn't make, or an argument makes no sense.
    """
    from packager.targets.ios.mil_rules import RULES

    translation = Translation(program)
    place = "the outputs"
    try:
        for operation in program.operations:
            place = f"operation {operation.type}"
            translation.add(operation, RULES)
        place = "the outputs"
        return translation.model()
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise MalformedProgram(f"{place}: {error!r}") from error
