"""A trained run, or engines that have one, behind HTTP.

A request to `serve` goes through `http_server`, `openai_api`, `completions` and `engine_thread` to `inference.engine`;
one of a chat goes through `chat_api` first. `page` is a web page to try the run, and `connections` are the server's
limits on clients. `route_server` goes in front of other engines, by `engines_file`, `route_api`, `engine_pool` and
`relay`, with `route_metrics`. Both share `http_app`, `http_messages`, `http_hosts` and `http_lifecycle`.

Imports from `core`, `processes`, `storage`, `data` and `inference`.
"""
