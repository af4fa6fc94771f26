"""Whether members can promise the same bits: their fingerprints, their numbers and the states they start from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planaria.core.messages import Ready


def misfit(report: Ready, at_work: Iterable[Ready]) -> str:
    """Why a joiner's bits could not be those of the members at work; empty if they can. One comparison is enough:
    those at work were compared with each other."""
    for other in at_work:
        keys = differing(other, report)
        return f"{report.member} differs from group {other.member.group} in {keys}" if keys else ""
    return ""


def odd_ones(reports: Sequence[Ready]) -> list[tuple[Ready, str]]:
    """Before the first quorum: the most common fingerprint and start wins (of equally common ones that of the lowest
    group); the odd ones come back, each with a sentence that names the difference."""
    ordered = sorted(reports, key=lambda report: report.member)
    kinds: dict[object, int] = {}
    for report in ordered:
        kinds[_kind(report)] = kinds.get(_kind(report), 0) + 1
    if len(kinds) < 2:
        return []
    usual = max(kinds, key=lambda kind: kinds[kind])  # the first of the most common
    model = next(report for report in ordered if _kind(report) == usual)
    odd = []
    for report in ordered:
        if _kind(report) != usual:
            keys = differing(model, report)
            if not keys:
                keys = "the protected state at the start (parameters, buffers or optimizer): seed every group alike"
            odd.append((report, f"{report.member} differs from group {model.member.group} in {keys}"))
    return odd


def differing(a: Ready, b: Ready) -> str:
    """Names and both values of the fingerprint entries in which two members differ."""
    left, right = dict(a.fingerprint), dict(b.fingerprint)
    left |= {"shards": str(a.shards), "steps": str(a.total_steps)}
    right |= {"shards": str(b.shards), "steps": str(b.total_steps)}
    keys = [k for k in sorted(left.keys() | right.keys()) if left.get(k) != right.get(k)]
    return ", ".join(f"{k} ({left.get(k, 'absent')} there, {right.get(k, 'absent')} here)" for k in keys)


def _kind(report: Ready) -> object:
    return (report.fingerprint, report.initial, report.shards, report.total_steps)
