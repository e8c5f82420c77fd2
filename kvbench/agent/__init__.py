"""THE OTHER MACHINE: what runs on a host with GPUs while the load comes from elsewhere, and tells of it over HTTP.

`GET /metrics` is a Prometheus page, `/samples` the latest fine readings, `/time` the clock that they are stamped with, `/health`
what is read and whether it still is. The collector `agent` (kvbench/collect/agent.py) is the other end.
"""
