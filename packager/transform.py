"""Transforms: what makes one model fit a target's dialect. Pure passes over an onnx-ir model, in a child process.

A pass is a frozen dataclass: its fields are its settings, so it prints in a plan, travels as JSON and enters cache
keys. It says what it needs (``check``), does its work (``run``) and promises what becomes of the signature
(``signature``); :func:`packager.transforming.apply` holds it to that promise, loads the result and checks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from packager.goldens import GoldenSet
from packager.model import Signature
from packager.parity import OutputRule
from packager.room import Step

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class Context:
    """What passes may use beside the model.

    ``source`` is the model file the run started from (read only), ``folder`` an empty folder for temporary files,
    ``goldens`` the golden cases with the reference's outputs (calibration and drift search use them), ``rules`` what
    the result will be judged by, for each output; ``None`` for the default policy's. ``calibration`` are files whose
    inputs static quantisation runs in place of the golden ones.
    """

    source: Path
    folder: Path
    goldens: GoldenSet
    rules: Mapping[str, OutputRule] | None = None
    calibration: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """What a pass made: the model (the same object, changed, or another) and sentences for the plan's notes.

    ``notes`` name what the user should know: nodes kept in fp32 and why, an opset that was raised, and so on.
    """

    model: ir.Model
    notes: tuple[str, ...] = ()


class Pass(Protocol):
    """One transform with its settings."""

    @property
    def name(self) -> str:
        """Short and stable: ``pin-shapes``, ``fp16``, ``int8-static``."""
        ...

    def step(self) -> Step:
        """The line of the plan: a gerund title and the settings that decide the result."""
        ...

    def signature(self, before: Signature) -> Signature:
        """The signature after the pass, given the one before: names, order, dtypes and dims."""
        ...

    def run(self, model: ir.Model, context: Context) -> Outcome:
        """Do it.

        Raises:
            Refused: the model can't be transformed so; nodes or tensors are named.
        """
        ...
