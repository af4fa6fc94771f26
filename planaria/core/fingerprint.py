"""Whether members can promise the same bits: their fingerprints, their numbers and the states they start from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planaria.core.messages import Ready

# Begins the keys of entries in which members may differ: their bits do then, and that is all that was promised.
SOFT = "~"
# Begins the values of entries in which the ranks of a group differ.
BY_RANK = "by rank "


def misfit(report: Ready, at_work: Iterable[Ready]) -> str:
    """Why a joiner's bits could not be those of the members at work; empty if they can. One comparison is enough:
    those at work were compared with each other."""
    for other in at_work:
        keys = differing(other, report)
        return f"{report.member} differs from group {other.member.group} in {keys}" if keys else ""
    return ""


def unfit(fingerprint: tuple[tuple[str, str], ...], at_work: Ready) -> str:
    """Why a single process could not be a rank of that group: names and both values. Empty if it can, or nothing is
    known of it, or that cannot be told because the ranks of the group differ in it."""
    there, here = dict(at_work.fingerprint), dict(fingerprint)
    if not here:
        return ""
    keys = [k for k in sorted(there.keys() | here.keys()) if there.get(k) != here.get(k) and not k.startswith(SOFT)]
    keys = [k for k in keys if not there.get(k, "").startswith(BY_RANK)]
    return ", ".join(f"{key} ({there.get(key, 'absent')} there, {here.get(key, 'absent')} here)" for key in keys)


def odd_ones(reports: Sequence[Ready], heals: int = 0) -> list[tuple[Ready, str]]:
    """Before the first quorum: the newest start wins, for it comes from a checkpoint, and of those the most common
    fingerprint and state (of equally common ones that of the lowest group); the odd ones come back, each with a
    sentence that names the difference. Who starts before step ``heals`` takes the state of that step from others, so
    it needs only the fingerprint."""
    ordered = sorted(reports, key=lambda report: report.member)
    kinds: dict[object, int] = {}
    for report in ordered:
        kinds[_kind(report)] = kinds.get(_kind(report), 0) + 1
    if len(kinds) < 2:
        return []
    steps = {_kind(report): report.step for report in ordered}
    usual = max(kinds, key=lambda kind: (steps[kind], kinds[kind]))  # the first of the most common
    model = next(report for report in ordered if _kind(report) == usual)
    odd = []
    for report in ordered:
        if _kind(report) != usual:
            keys = differing(model, report)
            if not keys and report.step < heals:
                continue
            if not keys and report.step != model.step:
                keys = f"the step from which it starts: {outdated(report, model.step)}"
            elif not keys:
                keys = "the protected state at the start (parameters, buffers or optimizer): seed every group alike"
            odd.append((report, f"{report.member} differs from group {model.member.group} in {keys}"))
    return odd


def drift(report: Ready, at_work: Iterable[Ready]) -> str:
    """What a joiner may differ in from the members at work, and does; empty if there is nothing."""
    for other in at_work:
        keys = differing(other, report, soft=True)
        told = f"{report.member} differs from group {other.member.group} in {keys}: its sums may round differently"
        return told if keys else ""
    return ""


def outdated(report: Ready, step: int) -> str:
    """What is wrong with a start that lies before ``step``, of which there is a checkpoint."""
    return f"step {report.step}, but there is a checkpoint of step {step}; give all groups the same directory for them"


def differing(a: Ready, b: Ready, soft: bool = False) -> str:
    """Names and both values of the fingerprint entries in which two members differ and must not, or may (``soft``)."""
    left, right = dict(a.fingerprint), dict(b.fingerprint)
    left |= {"shards": str(a.shards), "steps": str(a.total_steps)}
    right |= {"shards": str(b.shards), "steps": str(b.total_steps)}
    keys = [k for k in sorted(left.keys() | right.keys()) if left.get(k) != right.get(k) and k.startswith(SOFT) == soft]
    values = [(k.removeprefix(SOFT), left.get(k, "absent"), right.get(k, "absent")) for k in keys]
    return ", ".join(f"{key} ({there} there, {here} here)" for key, there, here in values)


def _kind(report: Ready) -> object:
    hard = tuple(entry for entry in report.fingerprint if not entry[0].startswith(SOFT))
    return (hard, report.initial, report.shards, report.total_steps, report.step)
