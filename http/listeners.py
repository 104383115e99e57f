"""Where the server listens: addresses, unix sockets, and the TLS context. All are made before the model is touched."""

from __future__ import annotations

import os
import socket
import ssl
import stat

BACKLOG = 4096


class BindError(Exception):
    """The address cannot be listened on; the message names the fix."""


def bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets for every address that `host` stands for. Raises BindError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise BindError(f"--host {host}: {error.strerror}. Use an address of this machine, or 0.0.0.0.") from None
    sockets: list[socket.socket] = []
    for family, kind, protocol, _, address in dict.fromkeys(found):
        listener = socket.socket(family, kind, protocol)
        sockets.append(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # With --port 0 the first address draws the port for all.
        chosen = port or (sockets[0].getsockname()[1] if len(sockets) > 1 else 0)
        try:
            listener.bind((address[0], chosen, *address[2:]))
            listener.listen(BACKLOG)
        except OSError as error:
            for opened in sockets:
                opened.close()
            raise BindError(
                f"Cannot listen on {host} port {port}: {error.strerror}. Choose another with --port N."
            ) from None
    return sockets


def bind_unix(path: str) -> list[socket.socket]:
    """A listening unix socket at `path`; one that nobody listens on any more is replaced. Raises BindError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode) and not _answers(path):
            os.unlink(path)
    except OSError:
        pass  # nothing there, or nothing of ours to say about it: bind will tell
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise BindError(f"Cannot listen on --uds {path}: {error.strerror or error}.") from None
    return [listener]


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0


def tls_context(certfile: str, keyfile: str | None, ca_certs: str | None) -> ssl.SSLContext:
    """Raises BindError naming the flag."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certfile, keyfile, password=lambda: "")
    except (OSError, ssl.SSLError) as error:
        names = f"--ssl-certfile {certfile}" + (f", --ssl-keyfile {keyfile}" if keyfile else "")
        raise BindError(f"{names}: no usable certificate and key ({error}).") from None
    if ca_certs is not None:
        try:
            context.load_verify_locations(ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise BindError(f"--ssl-ca-certs {ca_certs}: no usable certificates ({error}).") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context
