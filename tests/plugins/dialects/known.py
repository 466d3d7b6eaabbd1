"""The families that a server of oaiserve knows, and how it chooses among them."""

from functools import partial

from oaiserve.plugins.dialects import families
from oaiserve.routes.dialects import dialect
from oaiserve.routes.dialects.hermes import HERMES

FAMILIES = (*families(), HERMES)
dialect_of = partial(dialect.dialect_of, families=lambda: [families()])
family_of = partial(dialect.family_of, plugins=[families()])
