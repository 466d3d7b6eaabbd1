"""Unpacks archives of package indexes, in every Python that oaiserve supports."""

import tarfile
from pathlib import Path


def unpack_tar(archive: Path, folder: Path) -> None:
    """Unpack a tar archive into a folder."""
    with tarfile.open(archive) as packed:
        # The first versions of Python 3.11, as Debian's, have no filters, and ignore this.
        packed.extraction_filter = getattr(tarfile, "data_filter", None)
        packed.extractall(folder)
