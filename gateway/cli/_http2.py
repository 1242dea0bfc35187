"""HTTP/2 whose streams do not end for what comes for another of them.

Hypercorn 0.18 and h2 4.4 end the connection, and all that is under way in it, for a good part of
what RFC 9113 calls an error of one stream.
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

MANY = 64  # events of one read, after which others have their turn
HEADS = 4  # times what the settings name is decoded, for an answer that says so: 431
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_PATH = re.compile(rb"/[\x21-\x7e]*")
# What h2 catches where it decodes a head. The table that later heads refer to is lost then.
_UNDECODED = (hpack.HPACKError, IndexError, TypeError, UnicodeDecodeError)


def is_well_formed(head: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return True for a request's head that may pass, of those that h2 lets through.

    h2 has seen to it that names are lowercase, that pseudo-headers are known, complete, come once
    and first, that nothing is specific to a connection, that Host is :authority, and that
    Content-Length is a number. Left are what is a token and what is a field's value (RFC 9110,
    5.6.2 and 5.5), paths (RFC 9113, 8.3.1), and CONNECT, which nothing here serves.
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
    """The state of a connection that resets the stream for which a frame is wrong.

    h2 ends the connection for a malformed head or body, for one stream more than it allows, and
    for a priority that is wrong, which RFC 9113 (5.3.2) has done away with.
    """

    @property
    def open_inbound_streams(self) -> int:
        """Return 0: those beyond the bound are reset once their heads are decoded."""
        return 0

    def _receive_frame(self, frame: Frame) -> list[h2.events.Event]:
        try:
            events = super()._receive_frame(frame)
        except h2.exceptions.ProtocolError as error:
            if not self._is_of_its_stream(frame, error):
                raise
            events = self._reset(frame.stream_id, error.error_code)
            if isinstance(frame, DataFrame):  # others may send as much as before
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
        """Return True if what the whole connection goes by is as it should be."""
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
        else:  # h2 has closed it, and said nothing
            self._prepare_for_sending([RstStreamFrame(stream_id, error_code=code)])
        closed_by = h2.stream.StreamClosedBy.SEND_RST_STREAM  # what is still on its way is nothing
        stream.state_machine.stream_closed_by = closed_by
        return [h2.events.StreamReset(stream_id=stream_id, error_code=code, remote_reset=False)]

    def _receive_priority_frame(self, frame: Any) -> tuple[list[Frame], list[h2.events.Event]]:
        frame.depends_on = 0  # not on itself, which h2 takes for an error of the connection
        return super()._receive_priority_frame(frame)


class Http2(H2Protocol):
    """The streams of a connection, each with what came for it and nothing else.

    A body takes from the window of its stream until the app has read it. The window of the
    connection is larger than those of all streams together: bodies that wait to be read, or for
    room beside others, leave every other stream its own.

    Hypercorn looks up the stream of every piece of a body: one that came after an early answer (a
    401, a 413) was a KeyError. Priorities it keeps in a tree that throws once it is full, and after
    a thousand requests it says that the connection is over, whatever it still answers.
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
        # Twice, for h2 gives back what was read once it is half of the window.
        self._window = 2 * window * self.config.h2_max_concurrent_streams

    async def initiate(self, *args: Any) -> None:
        """Say what may be sent."""
        self.connection.initiate_connection()
        self.connection.increment_flow_control_window(
            self._window - self.connection.inbound_flow_control_window
        )
        await self._flush()
        self.task_group.spawn(self.send_task)

    async def stream_send(self, event: StreamEvent) -> None:
        """Send what a stream has to say, or let its client send more."""
        if not isinstance(event, Taken):
            await super().stream_send(event)
        elif not self.closed:
            self._give_back(event.size, event.stream_id)
            self.task_group.spawn(self._flush)  # the app may be cancelled, and what it sends cut

    def _give_back(self, size: int, stream_id: int) -> None:
        with contextlib.suppress(h2.exceptions.ProtocolError):  # the connection has ended
            self.connection.acknowledge_received_data(size, stream_id)

    async def _handle_events(self, events: list[h2.events.Event]) -> None:
        for event in events:  # one by one: each may end a stream that the next is for
            if isinstance(event, h2.events.PriorityUpdated):
                continue
            if isinstance(event, h2.events.DataReceived):
                kept = 0
                # Frames without a byte of data cost their sender nothing, nor may they us.
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
        if len(events) > MANY:  # what is read next is there already, and would be taken at once
            await asyncio.sleep(0)

    def _is_open(self, stream_id: int) -> bool:
        """Return False for a stream that was reset by what came together with its head."""
        stream = self.connection.streams.get(stream_id)
        return stream is not None and stream.open
