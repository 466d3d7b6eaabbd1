"""All attacks, by family."""

from __future__ import annotations

from tools.attack.families.access import KEYS
from tools.attack.families.bodies import CROWDS, NAMES, PROMPTS
from tools.attack.families.connections import CONNECTIONS, FRAMING, READERS
from tools.attack.families.generated import GENERATED
from tools.attack.families.grammars import GRAMMARS
from tools.attack.families.media import MEDIA
from tools.attack.families.replicas import REPLICAS
from tools.attack.families.uploads import UPLOADS

FAMILIES = (
    *(PROMPTS, FRAMING, GENERATED, GRAMMARS, UPLOADS, MEDIA),
    *(NAMES, READERS, CROWDS, KEYS, CONNECTIONS, REPLICAS),
)
ATTACKS = [attack for family in FAMILIES for attack in family.attacks]
