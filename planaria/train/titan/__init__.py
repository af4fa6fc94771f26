"""torchtitan under Planaria: its Trainer trains, groups are its replicas, and no edit to it is needed.

planaria run --groups 2 -m torchtitan.train --module planaria.train.titan.llama3 --config llama3_debugmodel …

One adapter file for each minor version of torchtitan, because its extension points change between them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from types import ModuleType
from typing import Any

from planaria.errors import UsageError

ADAPTERS = {"0.3": "v0_3"}


def adapter(version: str | None = None) -> ModuleType:
    """The adapter for the installed torchtitan. Raises UsageError naming the versions that there are adapters for."""
    supported = ", ".join(f"{minor}.x" for minor in ADAPTERS)
    try:
        found = version or importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            f"torchtitan is not installed; pip install planaria[titan] brings it (supported: {supported})"
        ) from None
    minor = ".".join(found.split(".")[:2])
    if minor not in ADAPTERS:
        raise UsageError(
            f"torchtitan {found} is installed, for which there is no adapter (supported: {supported}); install one of "
            "these"
        )
    return importlib.import_module(f"{__name__}.{ADAPTERS[minor]}")


def configurations(model: str) -> dict[str, Any]:
    """torchtitan's configurations of one of its models, by name, as functions that give the same under Planaria."""
    found: dict[str, Any] = adapter().configurations(model)
    return found


def under_planaria(config: Any) -> Any:
    """A ``torchtitan.trainer.Trainer.Config`` whose trainer trains under Planaria, for a model of your own::

    def my_model() -> Trainer.Config:
        return under_planaria(Trainer.Config(model_spec=…, …))
    """
    return adapter().under_planaria(config)
