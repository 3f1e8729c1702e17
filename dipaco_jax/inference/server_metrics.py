"""What a server measures, for Prometheus."""

import functools

import prometheus_client as prometheus

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Metrics:
  """Counters, gauges and histograms, in a registry of their own."""

  def __init__(self):
    prometheus.disable_created_metrics()
    self.registry = registry = prometheus.CollectorRegistry()
    counter = functools.partial(prometheus.Counter, registry=registry)
    gauge = functools.partial(prometheus.Gauge, registry=registry)
    histogram = functools.partial(prometheus.Histogram, registry=registry)
    self.requests = counter(
      'dipaco_requests', 'Requests for completions by HTTP status (499: the client disconnected).', ['status']
    )
    self.prompt_tokens = counter('dipaco_prompt_tokens', 'Prompt tokens read.')
    self.completion_tokens = counter('dipaco_completion_tokens', 'Tokens written.')
    self.waiting = gauge('dipaco_waiting_texts', 'Texts that have no token yet.')
    self.active = gauge('dipaco_active_texts', 'Texts that are growing.')
    self.connections = gauge('dipaco_connections', 'Open connections.')
    self.paths = gauge('dipaco_paths_loaded', 'Paths in memory.')
    self.batch = histogram(
      'dipaco_batch_texts', 'Texts that grew in one dispatch.', buckets=(1, 2, 4, 8, 16, 32, 64, 128)
    )
    self.first = histogram('dipaco_first_token_seconds', 'Seconds from a request to its first token.', buckets=SECONDS)
    self.each = histogram('dipaco_token_seconds', 'Seconds per token after the first.', buckets=SECONDS)
