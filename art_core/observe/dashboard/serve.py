"""Serving the dashboard.

Invariant: only this machine can reach it, unless the caller says otherwise; the port is taken before anything
is said about it; Ctrl-C ends it at once, open pages or not.
"""

import socket
from collections.abc import Callable
from ipaddress import ip_address

from rich.console import Console
from rich.text import Text

from art_core.errors import ConfigError
from art_core.plain_http import SERVER_KEPT_SECONDS
from art_core.store import Store
from art_core.views.text import safe

GRACE_SECONDS = 1
"""How long answers under way may take when the server is told to stop."""


def run(
    store: Store,
    host: str = "127.0.0.1",
    port: int = 7070,
    control: bool = False,
    *,
    public: bool = False,
    listens: Callable[[str], None] | None = None,
) -> None:
    """Serve a project's dashboard until Ctrl-C.

    Args:
        store: what it shows; the caller closes it.
        host: address to listen on.
        port: 0 takes a free one.
        control: whether the live knobs of a run can be turned on its page.
        listens: told its address once it listens, in place of standard output.
        public: listen beyond this machine if ``host`` says so. There is no login: everyone who reaches the
            port reads everything, and turns knobs with ``control``.

    Raises:
        ConfigError: ``host`` is not of this machine alone and ``public`` was not asked for; the port is
            taken; or the extra ``serve`` is not installed.
    """
    if not (public or is_loopback(host)):
        raise ConfigError(
            f"host={host!r} would let other machines read every trajectory, without a login: keep 127.0.0.1 "
            "and come through `ssh -L`, or say that it is meant to be public (--public, public=True)"
        )
    try:
        import uvicorn

        from art_core.observe.dashboard.app import create_app
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"the dashboard needs {missing.name}: pip install 'art-langgraph[serve]'"
        ) from missing
    listening = listen(host, port)
    port = listening.getsockname()[1]
    named = f"[{host}]" if ":" in host else host
    hosts = None if public else ("127.0.0.1", "localhost", "[::1]", named)
    app = create_app(store, control=control, hosts=hosts)
    config = uvicorn.Config(
        app,
        log_level="warning",
        timeout_keep_alive=SERVER_KEPT_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
        server_header=False,
    )
    url = f"http://{named}:{port}/"
    if listens is None:
        what = " (knobs can be turned)" if control else " (read-only)"
        line = Text(safe(store.location)).append(" on ").append(url, style=f"link {url}")
        Console(soft_wrap=True).print(line.append(f"{what}; Ctrl-C stops it"))
    else:
        listens(url)
    with listening:
        try:
            uvicorn.Server(config).run(sockets=[listening])
        except KeyboardInterrupt:  # uvicorn raises it again once it has shut down
            return


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there.

    Raises:
        ConfigError: it cannot.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(128)
    except OSError as refused:
        listening.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {refused.strerror}; give another port, or 0 for a free one"
        ) from refused
    return listening
