"""Arguments of a FaultTolerantJob that its pods would refuse are refused before there are pods."""

from __future__ import annotations

import pytest

from planaria.cli.pod_args import check
from planaria.errors import UsageError


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--groups=3", "x.py"], "--groups is what the operator says itself"),
        (["--reduction", "int8", "--first_group", "3", "x.py"], "--first-group is what the operator says itself"),
        (["--engine", "slurm", "x.py"], "--engine is what"),
        (["--image", "other", "x.py"], "--image is what"),
        (["--no-such-option", "x.py"], "--no-such-option"),
        (["--standbys", "two", "x.py"], "--standbys"),
        (["--quiet"], "SCRIPT"),
        (["--help"], "--help"),
    ],
)
def test_what_cannot_work_is_one_sentence_that_names_the_field(args: list[str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        check(args)
    text = str(caught.value)
    assert text.startswith("spec.template.spec.containers[0].args: ") and said in text and "\n" not in text


@pytest.mark.parametrize(
    "args",
    [
        ["x.py"],
        ["x.py", "--groups", "3", "--no-such-option"],  # the script's own
        ["--checkpoint", "/shared/x", "--checkpoint-every", "50", "x.py", "--lr", "3e-4"],
        ["-m", "package.module", "--help"],
        ["--standbys", "$(NUMBER)", "x.py"],  # Kubernetes puts it in
        ["--quiet", "$$(x).py"],
    ],
)
def test_what_can_work_is_let_through_whatever_the_operators_environment_says(
    args: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANARIA_RUN_GROUPS", "3")
    check(args)
