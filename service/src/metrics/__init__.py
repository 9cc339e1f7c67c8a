"""What operators watch: Prometheus metrics on a port of their own."""

from pykv.service.metrics.collector import DaemonCollector
from pykv.service.metrics.endpoint import MetricsEndpoint

__all__ = ["DaemonCollector", "MetricsEndpoint"]
