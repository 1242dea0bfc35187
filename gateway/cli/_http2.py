"""HTTP/2 in which an error of one stream does not end the others.

Hypercorn 0.18 and h2 4.4 end the connection, with all requests under way in it, for many of the
errors that RFC 9113 calls errors of one stream.
"""

import asyncio
import contextlib
import re
from collections.abc import Iterable
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import h2.stream
import hpack
from hypercorn.protocol.events import Body
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h2 import H2Protocol
from hyperframe.frame import DataFrame, Frame, HeadersFrame, RstStreamFrame

from gateway.cli._bodies import Taken

MANY = 64  # events of one read, after which other tasks run
HEADS = 4  # times the limit of the settings is decoded, so that we can answer 431
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_PATH = re.compile(rb"/[\x21-\x7e]*")
# What h2 catches when it decodes a head. The table that later heads refer to is then lost.
_UNDECODED = (hpack.HPACKError, IndexError, TypeError, UnicodeDecodeError)


def is_well_formed(head: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return True if a request's head that h2 has accepted is well-formed.

    h2 has checked that names are lowercase, that pseudo-headers are known, complete, unique and
    first, that no header is specific to a connection, that Host equals :authority, and that
    Content-Length is a number. Checked here are tokens and field values (RFC 9110, 5.6.2 and 5.5),
    paths (RFC 9113, 8.3.1), and CONNECT, which is not served.
    """
    fields = list(head)
    first = {name: value for name, value in fields if name.startswith(b":")}
    method, path = first.get(b":method", b""), first.get(b":path", b"")
    return (
        _TOKEN.fullmatch(method) is not None
        and method.upper() != b"CONNECT"
        and (_PATH.fullmatch(path) is not None or (method, path) == (b"OPTIONS", b"*"))
        and all(_TOKEN.fullmatch(name.removeprefix(b":")) for name, _ in fields)
        and all(_VALUE.fullmatch(value) for _, value in fields)
    )


class Streams(h2.connection.H2Connection):
    """The state of a connection in which a wrong frame resets only its own stream.

    h2 ends the connection for a malformed head or body, for one stream more than it allows, and
    for a wrong priority, a feature that RFC 9113 (5.3.2) has removed.
    """

    @property
    def open_inbound_streams(self) -> int:
        """0: streams beyond the bound are reset later, once their heads are decoded."""
        return 0

    def _receive_frame(self, frame: Frame) -> list[h2.events.Event]:
        try:
            events = super()._receive_frame(frame)
        except h2.exceptions.ProtocolError as error:
            if not self._is_of_its_stream(frame, error):
                raise
            events = self._reset(frame.stream_id, error.error_code)
            if isinstance(frame, DataFrame):  # so that other streams may send as much as before
                self.acknowledge_received_data(frame.flow_controlled_length, frame.stream_id)
            return events
        if not events or not isinstance(events[0], h2.events.RequestReceived):
            return events
        if self._open_streams(1) > self.local_settings.max_concurrent_streams:
            return self._reset(frame.stream_id, h2.errors.ErrorCodes.REFUSED_STREAM)
        if not is_well_formed(events[0].headers):
            return self._reset(frame.stream_id, h2.errors.ErrorCodes.PROTOCOL_ERROR)
        return events

    def _is_of_its_stream(self, frame: Frame, error: h2.exceptions.ProtocolError) -> bool:
        """Return True if an error leaves the state of the connection as a whole intact."""
        return (
            isinstance(frame, HeadersFrame | DataFrame)
            and frame.stream_id in self.streams
            and not isinstance(error, h2.exceptions.StreamClosedError)
            and not isinstance(error.__cause__, _UNDECODED)
            and self.inbound_flow_control_window >= 0
        )

    def _reset(self, stream_id: int, code: h2.errors.ErrorCodes) -> list[h2.events.Event]:
        stream = self.streams[stream_id]
        if stream.open:
            self.reset_stream(stream_id, code)
        else:  # h2 has closed it without a frame
            self._prepare_for_sending([RstStreamFrame(stream_id, error_code=code)])
        closed_by = h2.stream.StreamClosedBy.SEND_RST_STREAM  # later frames of it are ignored
        stream.state_machine.stream_closed_by = closed_by
        return [h2.events.StreamReset(stream_id=stream_id, error_code=code, remote_reset=False)]

    def _receive_priority_frame(self, frame: Any) -> tuple[list[Frame], list[h2.events.Event]]:
        frame.depends_on = 0  # a stream that depends on itself is an error of the connection to h2
        return super()._receive_priority_frame(frame)


class Http2(H2Protocol):
    """HTTP/2 whose streams are independent of one another.

    A body takes from the window of its stream until the app has read it. The window of the
    connection is larger than those of all streams together, so that unread bodies never take the
    window of another stream.

    Three faults of Hypercorn are avoided: it looks up the stream of every piece of a body, which
    raises KeyError after an early answer (a 401, a 413); it keeps priorities in a tree that raises
    once it is full; and after a thousand requests it ends the connection, even amid answers.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        most = self.config.h2_max_header_list_size
        self.connection = Streams(
            h2.config.H2Configuration(client_side=False, header_encoding=None)
        )
        self.connection.decoder.max_header_list_size = HEADS * most
        self.connection.local_settings = h2.settings.Settings(
            client=False,
            initial_values={
                h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: (
                    self.config.h2_max_concurrent_streams
                ),
                h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: most,
            },
        )
        window = self.connection.local_settings.initial_window_size
        # Twice, because h2 returns what was read only once it is half of the window.
        self._window = 2 * window * self.config.h2_max_concurrent_streams

    async def initiate(self, *args: Any) -> None:
        """Send our settings and open the window of the connection."""
        self.connection.initiate_connection()
        self.connection.increment_flow_control_window(
            self._window - self.connection.inbound_flow_control_window
        )
        await self._flush()
        self.task_group.spawn(self.send_task)

    async def stream_send(self, event: StreamEvent) -> None:
        """Send an event of a stream; for Taken, let its client send more."""
        if not isinstance(event, Taken):
            await super().stream_send(event)
        elif not self.closed:
            self._give_back(event.size, event.stream_id)
            self.task_group.spawn(self._flush)  # a task: the app may be cancelled

    def _give_back(self, size: int, stream_id: int) -> None:
        with contextlib.suppress(h2.exceptions.ProtocolError):  # the connection has ended
            self.connection.acknowledge_received_data(size, stream_id)

    async def _handle_events(self, events: list[h2.events.Event]) -> None:
        for event in events:  # one by one: each may end a stream that the next is for
            if isinstance(event, h2.events.PriorityUpdated):
                continue
            if isinstance(event, h2.events.DataReceived):
                kept = 0
                # Frames without data cost their sender nothing, so they may cost us nothing.
                if event.data and (stream := self.streams.get(event.stream_id)):
                    await stream.handle(Body(event.stream_id, event.data))
                    kept = len(event.data)
                self._give_back(event.flow_controlled_length - kept, event.stream_id)
            elif not isinstance(event, h2.events.RequestReceived):
                await super()._handle_events([event])
            elif self._is_open(event.stream_id):
                self.keep_alive_requests = 0
                await super()._handle_events([event])
        await self._flush()
        if len(events) > MANY:  # the next read would not wait either: let other tasks run
            await asyncio.sleep(0)

    def _is_open(self, stream_id: int) -> bool:
        """Return False for a stream that was reset by a frame read together with its head."""
        stream = self.connection.streams.get(stream_id)
        return stream is not None and stream.open
