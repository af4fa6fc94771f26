"""Tables of health rules: what a file may change, and what is wrong with others."""

from __future__ import annotations

import tomllib

import pytest

from planaria.core.health import Action
from planaria.core.healthtable import DEFAULT_RULES, Command, HealthTable, parse


def table(text: str) -> HealthTable:
    return parse(tomllib.loads(text))


def test_without_a_word_the_default_table_holds() -> None:
    assert table("").rules == HealthTable().rules == DEFAULT_RULES
    assert len({rule.name for rule in DEFAULT_RULES}) == len(DEFAULT_RULES)


def test_a_file_changes_rules_adds_others_and_turns_some_off() -> None:
    made = table(
        """
        every = 2
        share = 0.25
        dry_run = true
        command = { run = "check --disk '/data dir'", every = 60 }
        [rules.thermal]
        action = "drain"
        [rules.link-errors]
        above = 7
        [rules.ecc]
        action = "off"
        [rules.disk]
        signal = "command.bad_sectors"
        action = "drain"
        above = 5
        readings = 2
        """
    )
    rules = {rule.name: rule for rule in made.rules}
    assert (made.every, made.share, made.dry_run, made.given) == (2.0, 0.25, True, True)
    assert made.command == Command(("check", "--disk", "/data dir"), 60.0)
    assert rules["thermal"].action is Action.DRAIN and rules["thermal"].readings == 12
    assert (rules["link-errors"].above, rules["link-errors"].clear) == (7.0, None), "the old way back fits no more"
    assert rules["ecc"].action is Action.OFF
    assert (rules["disk"].above, rules["disk"].readings) == (5.0, 2)
    assert len(rules) == len(DEFAULT_RULES) + 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("evry = 1", "there is no key evry in the table; known keys: every, share, dry_run, command, rules"),
        ("every = 0", "every is 0; it must be between 0.05 and 3600 seconds"),
        ("every = true", "every must be a finite number"),
        ("share = 1.5", "share is 1.5; it must be between 0 and 1"),
        ("share = nan", "share must be a finite number"),
        (f"share = 1{'0' * 400}", "share must be a finite number"),
        ('dry_run = "yes"', "dry_run must be true or false"),
        ("command = 'check'", "command must be a table: [command]"),
        ("[command]\nevery = 3", 'command.run must be a command: "check.sh --quick", or a list of words'),
        ("[command]\nrun = []", 'command.run must be a command: "check.sh --quick", or a list of words'),
        ('[command]\nrun = "a \'b"', "command.run cannot be split into words: No closing quotation"),
        ("[command]\nrun = 'x'\ntimeout = 3", "there is no key timeout in [command]; known keys: run, every"),
        ("rules = 3", "rules must be tables: [rules.NAME]"),
        ("[rules.ecc]\nabov = 3", "there is no key abov in [rules.ecc]; known keys: signal, action, above"),
        ("[rules.ecc]\naction = 'kill'", "[rules.ecc]: there is no action 'kill'; known actions: drain, report, off"),
        ("[rules.ecc]\nreadings = 1.5", "[rules.ecc]: readings must be a whole number"),
        ("[rules.ecc]\nabove = 'x'", "[rules.ecc]: above must be a finite number"),
        ("[rules.mine]\nabove = 3", "[rules.mine]: it needs signal and action"),
        ("[rules.mine]\nsignal = 'ecc'\naction = 'drain'\nabove = 3", "[rules.mine]: there is no signal ecc; known"),
        ("[rules.ecc]\nsignal = 3", "[rules.ecc]: signal must be a name"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(text: str, why: str) -> None:
    with pytest.raises(ValueError) as caught:
        table(text)
    assert str(caught.value).startswith(why) and "\n" not in str(caught.value)
