"""
The control server: four JSON routes next to the scheduler, for the proxy and `kvshare doctor`.

It answers from memory; only `/drop` changes anything. If KVSHARE_VLLM_TOKEN is set, every route requires it,
because the journal holds generated token ids. If not, only programs of this machine may ask, and no web page.
"""

from __future__ import annotations

import hmac
import json
import logging
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from delta_tree import SegmentId
from kvshare.loopback import is_loopback
from kvshare.safe_logging import class_and_place
from kvshare.vllm_protocol.json_fields import Message, WireError
from kvshare.vllm_protocol.places import HeldSegments
from kvshare.vllm_protocol.replica_info import ReplicaInfo

if TYPE_CHECKING:
    from kvshare.vllm_connector.scheduler.scheduler import ConnectorScheduler  # imports vllm

log = logging.getLogger("vllm.kvshare.control")

_MAX_WAIT_S = 30.0
_MAX_BODY_BYTES = 16 * 1024 * 1024
_IDLE_S = 60.0


class ControlServer(ThreadingHTTPServer):
    """Runs in daemon threads of the scheduler's process. `close` is idempotent."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        info: Callable[[], ReplicaInfo],
        scheduler: ConnectorScheduler,
        *,
        host: str,
        port: int,
        token: str | None,
    ) -> None:
        """Raises OSError if it cannot listen on the address."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.info, self.scheduler, self.token = info, scheduler, token
        self.readers = _Readers()
        threading.Thread(target=self.serve_forever, name="kvshare-control", daemon=True).start()

    @property
    def port(self) -> int:
        """Return the port on which it listens, also if it was started with port 0: any free one."""
        return int(self.server_address[1])

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a failed connection for debugging only: clients may close theirs at any time."""
        if (exc := sys.exception()) is not None:
            log.debug("a control connection failed: %s", class_and_place(exc))


class _Readers:
    """Notes which proxy reads the journal, and warns once if two proxies take turns."""

    def __init__(self) -> None:
        self._current = ""
        self._earlier: set[str] = set()
        self._lock = threading.Lock()

    def note(self, proxy: str) -> None:
        """`proxy`: its random id, new after a restart; empty for other readers, such as `kvshare doctor`."""
        with self._lock:
            if proxy in ("", self._current):
                return
            if proxy in self._earlier and self._current not in self._earlier:
                log.warning(
                    "kvshare: two proxies use this vLLM, and each drops the KV that the other one stored. "
                    "Give each proxy a vLLM of its own"
                )
            self._earlier.add(self._current)
            self._current = proxy


class _Handler(BaseHTTPRequestHandler):
    server: ControlServer
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer({"/info": self.server.info, "/journal": self._journal, "/segments": self._segments})

    def do_POST(self) -> None:
        self._answer({"/drop": self._drop})

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, routes: Mapping[str, Callable[[], Message | dict[str, Any]]]) -> None:
        route = routes.get(urlsplit(self.path).path)
        if not self._is_authorized():
            self._send(401, {"error": "send KVSHARE_VLLM_TOKEN as bearer, or ask at a loopback address"})
        elif route is None:
            self._send(404, {"error": f"no such route; {self.command} routes are {', '.join(routes)}"})
        else:
            try:
                self._send(200, route())
            except WireError as exc:
                self._send(400, {"error": str(exc)})

    def _is_authorized(self) -> bool:
        if (token := self.server.token) is None:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname  # a browser may resolve any name
            is_page = "Origin" in self.headers or "Sec-Fetch-Site" in self.headers
            return is_loopback(host or "") and not is_page
        credentials = self.headers.get("Authorization", "")
        return hmac.compare_digest(credentials.encode(), f"Bearer {token}".encode())

    def _journal(self) -> Message:
        after = self._parameter("after", int)
        wait_s = min(self._parameter("wait_s", float), _MAX_WAIT_S)
        self.server.readers.note(self._text("proxy"))
        return self.server.scheduler.events.read(after, wait_s=wait_s)

    def _segments(self) -> Message:
        scheduler = self.server.scheduler
        last = scheduler.events.last  # read before the ids: a reader may see an event twice but misses none
        on_disk = tuple(scheduler.segments.only_on_disk())
        return HeldSegments(scheduler.events.epoch, last, tuple(scheduler.segments.ids()), on_disk)

    def _drop(self) -> dict[str, Any]:
        body = self._body()
        segment_ids, stays_shared = body.get("segment_ids"), body.get("stays_shared", False)
        if not isinstance(segment_ids, list) or not all(type(entry) is int for entry in segment_ids):
            raise WireError("segment_ids: expected a list of integers")
        if not isinstance(stays_shared, bool):
            raise WireError("stays_shared: expected true or false")
        entries = [SegmentId(entry) for entry in segment_ids]
        scheduler = self.server.scheduler
        if scheduler.news is not None and not stays_shared:
            scheduler.news.note_dropped(entries)
        return {"num_dropped": scheduler.drop(entries)}

    def _parameter(self, name: str, kind: type[int] | type[float]) -> Any:
        try:
            value = kind(self._text(name) or "0")
        except ValueError:
            value = kind(-1)
        if not value >= 0:
            raise WireError(f"{name}: expected a number of at least 0")
        return value

    def _text(self, name: str) -> str:
        return parse_qs(urlsplit(self.path).query).get(name, [""])[0]

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _MAX_BODY_BYTES:
            self.close_connection = True
            raise WireError(f"expected a body of at most {_MAX_BODY_BYTES} bytes with a Content-Length")
        try:
            document = json.loads(self.rfile.read(int(length)))
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise WireError("expected a JSON object")
        return document

    def _send(self, status: int, document: Message | dict[str, Any]) -> None:
        members = document.to_json() if isinstance(document, Message) else document
        body = json.dumps(members).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
