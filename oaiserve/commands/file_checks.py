"""Checks the files that settings name, before a server starts. Raises StartupError for one that cannot be used."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Iterable
from pathlib import Path

from oaiserve.checkpoints.adapters import BadAdapter, read_adapter
from oaiserve.config import Config, EngineOptions, ServerOptions, TelemetryOptions
from oaiserve.engine.text.builtin_templates import NAMES, template_file
from oaiserve.errors import StartupError
from oaiserve.explain.commands import settings_in
from oaiserve.http.keys import Keyring, exposure
from oaiserve.plugin import Plugin
from oaiserve.plugin_loading import dialects_of
from oaiserve.routes.intake.sampling_defaults import given_defaults

logger = logging.getLogger(__name__)

CERTIFICATE_NOT_YET_VALID = 9  # OpenSSL's codes, which Python's ssl doesn't name
CERTIFICATE_EXPIRED = 10


def check_files(
    server: ServerOptions, engine: EngineOptions, telemetry: TelemetryOptions, plugins: Iterable[Plugin]
) -> None:
    given_defaults(server.default_params)
    if server.tool_call_parser not in ("auto", "none"):
        from oaiserve.routes.dialects.dialect import check_name  # This module and the parsers are slow to import.

        check_name(server.tool_call_parser, dialects_of(plugins))
    if server.response_template is not None:
        from oaiserve.engine.text.response_template import read_response_template

        read_response_template(server.response_template)
    check_tls(server.tls_certificate, server.tls_key)
    if engine.chat_template is not None:
        _check_readable(
            "--chat-template", template_file(engine.chat_template), f" Give a Jinja file, or one of {', '.join(NAMES)}."
        )
    for name, folder in engine.adapters.items():
        try:
            read_adapter(folder)
        except BadAdapter as error:
            raise StartupError(f"--lora {name}={folder} cannot be used: {error}.") from error
    if engine.lora_dir is not None and not engine.lora_dir.is_dir():
        raise StartupError(f"--lora-dir is '{engine.lora_dir}', which is not a folder.")
    Keyring((), server.api_key_file)  # raises StartupError if a file has no keys
    recording = telemetry.record_requests
    if recording is not None and recording.is_dir():
        raise StartupError(f"--record-requests is '{recording}', which is a folder, and must be a file.")
    if recording is not None and not os.access(recording.parent, os.W_OK | os.X_OK):
        raise StartupError(f"--record-requests is '{recording}', but '{recording.parent}' is not a writable folder.")


def _check_readable(flag: str, path: Path | None, instead: str = "") -> None:
    try:
        if path is not None:
            path.open("rb").close()
    except OSError as error:
        raise StartupError(f"{flag} is '{path}', which cannot be read: {error.strerror}.{instead}") from error


def check_tls(certificate: Path | None, key: Path | None) -> None:
    _check_readable("--tls-certificate", certificate)
    _check_readable("--tls-key", key)
    if certificate is None:
        return
    try:
        # The empty passphrase keeps OpenSSL from asking for one at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        raise StartupError(
            f"--tls-certificate '{certificate}' and --tls-key '{key}' are not a PEM certificate "
            f"and its key without a passphrase ({error.reason or error})."
        ) from error


def refused_certificate(certificate: Path, key: Path) -> str | None:
    """Return why clients would reject the certificate's dates, or None. It tries a TLS handshake in memory."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(certificate)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # The signer doesn't matter.
    to_server = ssl.MemoryBIO()
    to_client = ssl.MemoryBIO()
    begun = client.wrap_bio(to_client, to_server)
    answered = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (begun, answered, begun):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            pass  # The other end continues the handshake.
        except ssl.SSLCertVerificationError as error:
            if error.verify_code in (CERTIFICATE_NOT_YET_VALID, CERTIFICATE_EXPIRED):
                return error.verify_message
            return None
    return None


def files_with_keys(config: Config) -> list[Path]:
    files = list(config.server.api_key_file)
    if config.file is not None and {"api-key", "api_key"} & settings_in(config.file).keys():
        files.append(config.file)
    return files


def warn_of_exposed_keys(config: Config) -> None:
    for path in files_with_keys(config):
        if (warning := exposure(path)) is not None:
            logger.warning("%s", warning)
