"""Names for plug-ins with `keys`: API keys from another place, such as a directory of users.

A `KeySource` returns the valid keys by their digests. A `Key` has a name, by which its holder is known to operators,
and a `Right` or several:

>>> from hashlib import sha256
>>> digest = sha256(b"secret").digest()
>>> guest = Key("guest", digest, rights=Right.USE)
>>> class Guests(KeySource):
...     def valid(self) -> dict[bytes, Key]:
...         return {digest: guest}
...     async def close(self) -> None:
...         pass
>>> Guests().valid()[digest].name
'guest'

A subclass of `Key` whose `new_use` returns a `KeyUse` counts what each request uses, or limits it. `check_model` and
`reserve` refuse a request by raising `Forbidden` or `RateLimited`:

>>> class Use(KeyUse):
...     async def reserve(self, tokens: int) -> None:
...         if tokens > 1000:
...             raise RateLimited("This key may use 1,000 tokens at a time.", "tokens", None)
...     async def headers(self) -> dict[str, str]:
...         return {}
...     def settle(self, tokens: int, cost: float) -> None:
...         pass
>>> class SmallKey(Key):
...     def check_model(self, *names: str) -> None:
...         if "small" not in names:
...             raise Forbidden("This key may use the model 'small' only.")
...     def new_use(self) -> KeyUse:
...         return Use()
>>> SmallKey("guest", digest).check_model("large")
Traceback (most recent call last):
oaiserve.errors.Forbidden: This key may use the model 'small' only.
"""

from oaiserve.errors import Forbidden, RateLimited
from oaiserve.http.keys import Key, KeySource, KeyUse, Right

__all__ = ["Forbidden", "Key", "KeySource", "KeyUse", "RateLimited", "Right"]
