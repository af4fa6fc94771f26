"""Which torchtitan there is an adapter for. These need no torchtitan."""

from __future__ import annotations

import importlib.util

import pytest

from planaria.errors import UsageError
from planaria.train import titan


@pytest.mark.parametrize("version", ["0.2.2", "0.4.0", "1.0", "0.30.0"])
def test_an_unknown_version_is_refused_with_those_that_are_known(version: str) -> None:
    with pytest.raises(UsageError, match=rf"torchtitan {version} .*supported: 0\.3\.x"):
        titan.adapter(version)


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is not None, reason="torchtitan is installed")
def test_its_absence_is_said_with_what_to_install() -> None:
    with pytest.raises(UsageError, match=r"pip install planaria\[titan\] .*0\.3\.x"):
        titan.configurations("llama3")
