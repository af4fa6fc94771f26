"""Exact two-way conversion between the dataclasses of ``planaria.core.messages`` and their protobuf forms.

Decoding trusts nothing: whatever bytes come in, the outcome is a valid value or ProtocolError. Encoding
applies the same limits (``wire.checks``), so that a mistake shows at the sender; only free text is cut to fit
instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from planaria.core.messages import Order, Report
from planaria.errors import ProtocolError
from planaria.wire import checks
from planaria.wire import control_pb2 as pb
from planaria.wire.orders import order_in, order_out
from planaria.wire.reports import report_in, report_out

A = TypeVar("A")
B = TypeVar("B")
M = TypeVar("M", bound=Message)


def encode_report(report: Report) -> pb.Report:
    """Raises ProtocolError if the report breaks a limit of the protocol."""
    return guarded(report_out, report)


def decode_report(message: pb.Report) -> Report:
    """Raises ProtocolError if the message says nothing that makes sense."""
    return guarded(report_in, message)


def encode_order(order: Order) -> pb.Order:
    """Raises ProtocolError if the order breaks a limit of the protocol."""
    return guarded(order_out, order)


def decode_order(message: pb.Order) -> Order:
    """Raises ProtocolError if the message says nothing that makes sense."""
    return guarded(order_in, message)


def report_from_bytes(data: bytes) -> Report:
    """Any bytes: a Report, or ProtocolError."""
    return decode_report(parse(pb.Report, data))


def order_from_bytes(data: bytes) -> Order:
    """Any bytes: an Order, or ProtocolError."""
    return decode_order(parse(pb.Order, data))


def parse(kind: type[M], data: bytes) -> M:
    """``data`` as a protobuf message of ``kind``, else ProtocolError."""
    if len(data) > checks.MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a {kind.__name__} of {len(data)} bytes, more than {checks.MAX_MESSAGE_BYTES}")
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ProtocolError(f"not a {kind.__name__}: {error}") from error


def guarded(convert: Callable[[A], B], value: A) -> B:
    """``convert(value)``; what protobuf itself refuses (a number too large, text that is not Unicode) is a
    ProtocolError too."""
    try:
        return convert(value)
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"cannot convert a {type(value).__name__}: {error}") from error
