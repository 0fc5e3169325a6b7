"""Weights stored as fp16, each rounded once at most.

The dialect rounds the model's weights before OpenVINO sees them, so that the cost is known. OpenVINO then folds
constants into each other, and its own compression would round the results once more, unseen. So what fp16 holds exactly
is stored as fp16 here, and what folding made stays float32, where it is small: biases, scales, steps of an activation.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import openvino

SMALL = 4096
"""Elements below which a constant that fp16 doesn't hold stays float32: 16 kB. Larger ones are rounded."""


@contextmanager
def halved(model: openvino.Model) -> Iterator[None]:
    """Replace float32 constants by fp16 ones in place; they lie in a temporary file, mapped, until the block ends.

    Scalars stay as they are, and so does what would overflow.

    Raises:
        OSError: there is no room for half of the weights in the temporary folder.
    """
    import openvino.opset13 as operations

    # Windows can't remove the file while the model, which outlives the block, has it mapped.
    with tempfile.TemporaryDirectory(prefix="packager-halves-", ignore_cleanup_errors=True) as name:
        file = Path(name) / "weights"
        places = []
        with file.open("wb") as stream:
            for node in model.get_ordered_ops():
                half = _half(node)
                if half is not None:
                    places.append((node, stream.tell(), half.shape))
                    half.tofile(stream)
        for node, offset, shape in places:
            stored = np.memmap(file, np.float16, "r+", offset, shape)  # OpenVINO takes no read-only ones
            constant = operations.constant(stored, shared_memory=True)
            wide = operations.convert(constant, "f32")
            constant.set_friendly_name(f"{node.get_friendly_name()}_half")
            wide.set_friendly_name(node.get_friendly_name())
            for reader in list(node.output(0).get_target_inputs()):
                reader.replace_source_output(wide.output(0))
        yield


def _half(node: openvino.Node) -> np.ndarray | None:
    """A constant in fp16, where it may be stored so."""
    import openvino

    if node.get_type_name() != "Constant" or node.get_element_type() != openvino.Type.f32:
        return None
    array = np.asarray(node.data)
    if array.size < 2:
        return None
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    exact = np.array_equal(half, array) if array.size < SMALL else np.array_equal(np.isinf(half), np.isinf(array))
    return half if exact else None
