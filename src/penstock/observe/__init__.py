"""What happened in a run and what a person sees of it. The views need `rich` only once they draw."""

from penstock.observe.events import Event, decode_event, encode_event
from penstock.observe.log import EventLog, read_events
from penstock.observe.metrics import MetricsLog, read_metrics
from penstock.observe.notices import Notice, Notices
from penstock.observe.samples import SampleRecord, SamplesLog, read_samples
from penstock.observe.state import FleetSnapshot, InstanceRow, RunView

__all__ = [
    "Event",
    "EventLog",
    "FleetSnapshot",
    "InstanceRow",
    "MetricsLog",
    "Notice",
    "Notices",
    "RunView",
    "SampleRecord",
    "SamplesLog",
    "decode_event",
    "encode_event",
    "read_events",
    "read_metrics",
    "read_samples",
]
