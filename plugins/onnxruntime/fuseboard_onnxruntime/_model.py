"""A converted region, and what has to be known to call it.

Apart from what converts: a process that finds a model in a cache imports neither torch's exporter
nor onnx, which take longer than the rest of loading.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Input:
    """One input of a model.

    :ivar position: among the region's inputs.
    :ivar order: the dimensions as the model wants them; None where they are as in torch.
    :ivar number: it is an int in a call, and a 0-d tensor for the model.
    """

    name: str
    position: int
    onnx_type: int
    order: tuple[int, ...] | None = None
    number: bool = False


@dataclass(frozen=True)
class Output:
    """One output of a model, or of a call.

    :ivar copy_of: it is a copy of the output of that number; the model hasn't got it.
    :ivar order: from the model's dimensions to torch's.
    :ivar shape: as the model gives it; None where it depends on symbolic sizes.
    :ivar strides: where they aren't those of a permuted row-major tensor; else None.
    :ivar strides_at: where these are symbolic, their place in what ``Model.sizes`` gives.
    :ivar passes: it is the region's input of that number, copied.
    """

    name: str = ""
    onnx_type: int = 0
    shape: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    strides_at: int | None = None
    copy_of: int | None = None
    passes: int | None = None


@dataclass(frozen=True)
class Model:
    """A converted region. It holds no weights: these are inputs, or initializers whose data is
    given to each session.

    :ivar proto: the serialised ONNX model.
    :ivar sizes: code of a function from the inputs to the shapes of the outputs that are computed,
        then to strides; "" if all are static.
    :ivar notes: for the report: which composites are in it.
    """

    proto: bytes
    inputs: tuple[Input, ...]
    outputs: tuple[Output | None, ...]
    sizes: str = ""
    notes: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        """For a cache: a line of JSON, then the proto."""
        head = {
            "inputs": [asdict(value) for value in self.inputs],
            "outputs": [value and asdict(value) for value in self.outputs],
            "sizes": self.sizes,
            "notes": self.notes,
        }
        return json.dumps(head).encode() + b"\n" + self.proto

    @classmethod
    def from_bytes(cls, data: bytes) -> Model:
        """What :meth:`to_bytes` wrote."""
        head, _, proto = data.partition(b"\n")
        found = json.loads(head)
        return cls(
            proto,
            tuple(Input(**_tuples(value)) for value in found["inputs"]),
            tuple(value and Output(**_tuples(value)) for value in found["outputs"]),
            found["sizes"],
            tuple(found["notes"]),
        )


def _tuples(value: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(item) if isinstance(item, list) else item for key, item in value.items()}
