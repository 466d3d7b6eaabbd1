"""Makes certificates with openssl, because Python's own library makes none."""

import subprocess
from pathlib import Path

import pytest

_CONFIG = """
[ca]
default_ca = own
[own]
database = {0}/index
new_certs_dir = {0}
rand_serial = yes
default_md = sha256
unique_subject = no
policy = any
[any]
commonName = supplied
[names]
subjectAltName = DNS:{1}
"""


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return self-signed certificates of kinds, each in a file with its key."""
    made = {}
    for kind, name, begin, end in [
        ("sound", "localhost", "20000101000000Z", "20990101000000Z"),
        ("expired", "localhost", "20000101000000Z", "20010101000000Z"),
        ("not yet valid", "localhost", "20980101000000Z", "20990101000000Z"),
        ("of another", "other.test", "20000101000000Z", "20990101000000Z"),
    ]:
        folder = tmp_path_factory.mktemp("certificate")
        (folder / "index").touch()
        (folder / "config").write_text(_CONFIG.format(folder, name))
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "key.pem"]
        own = ["-batch", "-config", "config", "-selfsign", "-keyfile", "key.pem", "-in", "request.pem", "-notext"]
        valid = ["-startdate", begin, "-enddate", end, "-extensions", "names", "-out", "certificate.pem"]
        for command in (["req", "-new", "-subj", f"/CN={name}", *key, "-out", "request.pem"], ["ca", *own, *valid]):
            subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True)
        made[kind] = folder / "both.pem"
        made[kind].write_text((folder / "key.pem").read_text() + (folder / "certificate.pem").read_text())
    return made
