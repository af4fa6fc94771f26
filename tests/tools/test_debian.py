"""Debian's packages for tests, where nothing is installed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tools import debian


def test_every_stanza_of_a_list_of_sources_counts() -> None:
    text = """
# a comment: with a colon
Types: deb
URIs: http://one
Suites: stable stable-updates
Components: main
Signed-By: /keys/one.gpg

Types: deb
URIs: http://two http://three
Suites: stable-security
Components: main contrib
"""
    assert debian._stanzas(text) == [
        "[signed-by=/keys/one.gpg] http://one stable main",
        "[signed-by=/keys/one.gpg] http://one stable-updates main",
        "http://two stable-security main contrib",
        "http://three stable-security main contrib",
    ]


def test_what_takes_too_long_or_fails_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(debian.Unavailable, match="nothing came: it takes too long"):
        debian.run(["sleep", "60"], tmp_path, 0.0, "nothing came")
    with pytest.raises(debian.Unavailable, match="nothing came: because"):
        debian.run(["sh", "-c", "echo because; exit 3"], tmp_path, time.monotonic() + 60, "nothing came")
