"""Compiled code in torch's own archives, ``.pt2`` files by AOTInductor.

Read against torch 2.13: ``torch/csrc/inductor/aoti_package/model_package_loader.cpp``. The loader
needs a file, and writes the libraries in it to a folder of its own in ``/tmp``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


class ArchivedCode:
    """Boxed: calls the model in an archive with the tensors among its inputs.

    :param archive: the file's bytes.
    """

    def __init__(self, archive: bytes) -> None:
        self._archive = archive
        with tempfile.TemporaryDirectory(prefix="fuseboard_") as folder:
            path = Path(folder) / "code.pt2"
            path.write_bytes(archive)
            self._loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)

    def __reduce__(self) -> tuple[Any, ...]:
        return ArchivedCode, (self._archive,)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        args.clear()
        return self._loader.boxed_run(tensors)
