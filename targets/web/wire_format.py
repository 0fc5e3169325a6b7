"""Golden cases as messages between packager and a page: a JSON header and the tensors' bytes.

A message is the header's length (uint32, little endian, padded to 8 bytes), the header in UTF-8 padded to 8 bytes, and
each tensor's little-endian bytes padded to 8. Strings are in the header. ``harness/work.js`` is the other end.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING

from packager.errors import VerificationError
from packager.model import Signature

if TYPE_CHECKING:
    import numpy as np


def encode(feeds: Mapping[str, np.ndarray]) -> bytes:
    """Arrays by name as a message."""
    import numpy as np

    tensors: list[dict[str, object]] = []
    parts: list[bytes] = []
    for name, array in feeds.items():
        entry: dict[str, object] = {"name": name, "dims": list(array.shape)}
        if array.dtype.kind in "OUS":
            texts = [_text(item) for item in array.ravel().tolist()]
            tensors.append({**entry, "dtype": "string", "bytes": 0, "strings": texts})
            continue
        data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
        tensors.append({**entry, "dtype": array.dtype.name, "bytes": len(data)})
        parts += [data, bytes(-len(data) % 8)]
    header = json.dumps({"tensors": tensors}).encode()
    return b"".join([struct.pack("<II", len(header), 0), header, bytes(-len(header) % 8), *parts])


def decode(message: bytes, signature: Signature) -> dict[str, np.ndarray]:
    """The outputs in a message, each of the dtype that the signature says.

    Raises:
        VerificationError: the message is cut, or a tensor has another dtype or size than it says.
    """
    import numpy as np

    dtypes = {spec.name: spec.dtype for spec in signature.outputs}
    outputs: dict[str, np.ndarray] = {}
    try:
        length, _ = struct.unpack_from("<II", message)
        header = json.loads(message[8 : 8 + length].decode("utf-8"))
        at = 8 + length + -length % 8
        for entry in header["tensors"]:
            name, dims = str(entry["name"]), tuple(int(dim) for dim in entry["dims"])
            if entry["dtype"] != dtypes[name]:
                raise ValueError(f"output '{name}' is {entry['dtype']}, not {dtypes[name]}")
            if entry["dtype"] == "string":
                outputs[name] = np.array(entry["strings"], object).reshape(dims)
                continue
            size = int(entry["bytes"])
            if at + size > len(message):
                raise ValueError(f"output '{name}' is cut")
            dtype = np.dtype(entry["dtype"]).newbyteorder("<")
            flat = np.frombuffer(message, dtype, size // dtype.itemsize, at)
            outputs[name] = flat.reshape(dims).astype(dtype.newbyteorder("="))
            at += size + -size % 8
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise VerificationError(f"the page's answer makes no sense: {error}") from error
    return outputs


def _text(item: object) -> str:
    return item.decode("utf-8") if isinstance(item, bytes) else str(item)
