"""Decisions taken from a fuzzer's bytes, so that what it mutates is a program and not only a message."""

from google.protobuf.descriptor import FieldDescriptor

NUMBERS = [0, 1, 2, 7, 63, 64, 65, 255, 4095, 4096, 4097, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
LARGE = [1 << 32, (1 << 62) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
WAITS = {"wait_ms", "deadline_ms"}
WAIT_MS_MAX = 30  # a hang must be ours, not one that was asked for
_UNSIGNED_32 = {FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_FIXED32}
_SIGNED_32 = {FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_SINT32, FieldDescriptor.TYPE_ENUM}
_SIGNED_64 = {FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_SINT64}


class Choices:
    """Reads bytes to their end, then zeros."""

    def __init__(self, data):
        self._data = data
        self._at = 0

    @property
    def left(self):
        return max(0, len(self._data) - self._at)

    def byte(self):
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def of(self, choices):
        return choices[self.byte() % len(choices)]

    def bytes(self, most):
        size = min(self.byte() | self.byte() << 8, most)
        taken = self._data[self._at : self._at + size]
        self._at += size
        return bytes(taken)

    def rest(self):
        taken = self._data[self._at :]
        self._at = len(self._data)
        return bytes(taken)


def mutated(choices, message):
    """A copy of a message with some of its fields changed, as far as the choices say."""
    copy = type(message)()
    copy.CopyFrom(message)
    for _ in range(choices.byte() % 4):
        _change(choices, copy)
    if choices.byte() % 16 == 15:
        copy = _flipped(choices, copy)
    return bounded(copy)


def bounded(message):
    """No longer waits than a test has time for."""
    for field in message.DESCRIPTOR.fields:
        if field.name in WAITS:
            setattr(message, field.name, min(getattr(message, field.name), WAIT_MS_MAX))
    return message


def _change(choices, message):
    if not message.DESCRIPTOR.fields:
        return
    field = choices.of(message.DESCRIPTOR.fields)
    if field.label == FieldDescriptor.LABEL_REPEATED:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            return
        values = list(getattr(message, field.name)) * (choices.byte() % 3)
        message.ClearField(field.name)
        getattr(message, field.name).extend([*values, *(_value(choices, field) for _ in range(choices.byte() % 5))])
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        _change(choices, getattr(message, field.name))
    elif field.type == FieldDescriptor.TYPE_BYTES and choices.byte() % 2:
        whole = bytes(getattr(message, field.name))
        setattr(message, field.name, choices.of([whole[:-1], whole[1:], whole * 2, whole[:8], whole + b"\0"]))
    else:
        setattr(message, field.name, _value(choices, field))


def _value(choices, field):
    if field.type == FieldDescriptor.TYPE_BYTES:
        return choices.bytes(256)
    if field.type == FieldDescriptor.TYPE_STRING:
        return choices.bytes(256).decode("latin-1")
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return choices.of([0.0, -1.0, 1e308, float("inf"), float("nan")])
    if field.type == FieldDescriptor.TYPE_BOOL:
        return bool(choices.byte() % 2)
    if field.type in _UNSIGNED_32:
        return choices.of(NUMBERS)
    if field.type in _SIGNED_32:
        return choices.of([n - (1 << 31) for n in NUMBERS if n < 1 << 31] + [n for n in NUMBERS if n < 1 << 31])
    numbers = NUMBERS + LARGE
    return choices.of([n - (1 << 63) for n in numbers] if field.type in _SIGNED_64 else numbers)


def _flipped(choices, message):
    data = bytearray(message.SerializeToString())
    if data:
        data[choices.byte() % len(data)] ^= 1 << choices.byte() % 8
    try:
        return type(message).FromString(bytes(data))
    except Exception:  # then it stays as it was
        return message
