"""All attacks, by family."""

from __future__ import annotations

from tools.attack.families.access import KEYS
from tools.attack.families.bodies import CROWDS, PROMPTS
from tools.attack.families.connections import CONNECTIONS, READERS
from tools.attack.families.generated import GENERATED
from tools.attack.families.grammars import GRAMMARS
from tools.attack.families.media import MEDIA
from tools.attack.families.mixed import mixture
from tools.attack.families.uploads import UPLOADS

FAMILIES = (PROMPTS, GENERATED, GRAMMARS, UPLOADS, MEDIA, READERS, CROWDS, KEYS, CONNECTIONS)
ATTACKS = [attack for family in FAMILIES for attack in family.attacks]
ATTACKS += mixture(ATTACKS).attacks
