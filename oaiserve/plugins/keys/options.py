"""The settings of stored keys."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysOptions:
    stored_keys: bool = False
    """Require a key that `oaiserve keys` made in the file of --response-store, or one of --api-key and
    --api-key-file."""

    default_share: float = 1.0
    """Share of stored keys without one of their own (`oaiserve keys limit`). Under --policy fair, clients who want as
    much get the server in relation to their shares. Keys of --api-key and --api-key-file have 1."""

    @property
    def needs_key(self) -> bool:
        return self.stored_keys
