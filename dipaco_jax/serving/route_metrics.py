"""What the router in front of engines counts, for Prometheus."""

import functools

import prometheus_client as prometheus

SECONDS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)


class Metrics:
  def __init__(self):
    prometheus.disable_created_metrics()
    self.registry = registry = prometheus.CollectorRegistry()
    counter = functools.partial(prometheus.Counter, registry=registry)
    gauge = functools.partial(prometheus.Gauge, registry=registry)
    description = 'Requests by HTTP status (499: the client disconnected).'
    self.requests = counter('dipaco_requests', description, ['status'])
    self.routed = counter('dipaco_routed_texts', 'Prompts and conversations by the path that they went to.', ['path'])
    self.retries = counter('dipaco_retries', 'Requests that went to another engine after one had failed.')
    self.connections = gauge('dipaco_connections', 'Open connections.')
    self.engine_in = gauge('dipaco_engine_in', '1 for an engine that answers, 0 for one that is out.', ['path', 'url'])
    self.engine_open = gauge('dipaco_engine_open_requests', 'Requests that an engine is at.', ['path', 'url'])
    description = 'Seconds from a whole request to the choice of its path.'
    self.route_s = prometheus.Histogram('dipaco_route_seconds', description, registry=registry, buckets=SECONDS)
