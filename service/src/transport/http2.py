"""HTTP/2's state of one connection, with bounds on what a peer, or many calls, make it remember."""

from h2.connection import H2Connection
from h2.events import Event
from h2.settings import SettingCodes
from hyperframe.frame import Frame, SettingsFrame

__all__ = ["BoundedH2Connection"]

MAX_HEADER_TABLE_BYTES = 4096
KNOWN_SETTINGS = frozenset(SettingCodes)


class BoundedH2Connection(H2Connection):
    """h2's connection; beside its streams and windows it keeps some 100 KiB at most.

    Attributes:
        MAX_CLOSED_STREAMS: streams whose ends are remembered, for the frames that were on their way meanwhile; data on
            one that was forgotten is answered by a reset.
    """

    MAX_CLOSED_STREAMS = 1024

    def _receive_settings_frame(self, frame: SettingsFrame) -> tuple[list[Frame], list[Event]]:
        """Ignores what is unknown, as HTTP/2 demands, and takes no larger table for headers than the default.

        h2 would keep each of the 65 536 settings that a peer may name, and index every header that is sent.
        """
        settings = {code: value for code, value in frame.settings.items() if code in KNOWN_SETTINGS}
        if SettingCodes.HEADER_TABLE_SIZE in settings:
            wanted = settings[SettingCodes.HEADER_TABLE_SIZE]
            settings[SettingCodes.HEADER_TABLE_SIZE] = min(wanted, MAX_HEADER_TABLE_BYTES)
        frame.settings = settings
        received = super()._receive_settings_frame(frame)
        self._merge_table_sizes()
        return received

    def _merge_table_sizes(self) -> None:
        """Of the sizes that the next headers must tell, the least and the last are enough."""
        sizes = self.encoder.table_size_changes
        if len(sizes) > 2:
            sizes[:] = [min(sizes), sizes[-1]]
