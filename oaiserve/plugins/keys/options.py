"""The settings of stored keys."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysOptions:
    stored_keys: bool = False
    """Require a key that `oaiserve keys` made in the file of --response-store, or one of --api-key and
    --api-key-file."""

    @property
    def needs_key(self) -> bool:
        return self.stored_keys
