"""`fields_of`: the JSON of a body's fields by name, without an object for each name that a client makes up."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import msgspec
from msgspec import UNSET, UnsetType

from oaiserve.routes.intake.wishes import NAMES

Fields = Mapping[str, msgspec.Raw]
_MOST_NAMED_BYTES = 2**20  # bytes of a body of which all names are read: millions would take a second, and much memory
decode_names = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def fields_of(kind: type[msgspec.Struct], body: bytes | bytearray) -> Fields:
    """Return the JSON of the fields of a body of this kind. A large body keeps only the first of its unknown names.

    The values are views of the body: copy what is kept. Raises msgspec.DecodeError and RecursionError.
    """
    if len(body) <= _MOST_NAMED_BYTES:
        return decode_names(body)
    known = msgspec.structs.asdict(_decoder_of(kind, is_strict=False).decode(body))
    fields = {name: value for name, value in known.items() if value is not UNSET}
    try:
        _decoder_of(kind, is_strict=True).decode(body)
    except msgspec.ValidationError as error:
        fields[str(error).partition("`")[2].rpartition("`")[0]] = msgspec.Raw(b"null")
    return fields


@cache
def _decoder_of(kind: type[msgspec.Struct], *, is_strict: bool) -> msgspec.json.Decoder[msgspec.Struct]:
    names = {*kind.__struct_fields__, *NAMES}
    fields = [(name, msgspec.Raw | UnsetType, UNSET) for name in sorted(names)]
    return msgspec.json.Decoder(msgspec.defstruct("Fields", fields, forbid_unknown_fields=is_strict))
