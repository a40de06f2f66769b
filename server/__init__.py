"""The HTTP server: OpenAI's completions and chat completions over one engine.

app         routes                        lifecycle   bind, load, serve, drain, stop
access      key, body cap, in-flight      service     what is loaded, what is in flight
decode      bytes -> request struct       protocol    the structs
params      fields -> SamplingParams      generation  one request inside the engine
completion  chat                          request -> engine -> answer, whole or streamed
split       reasoning | content           sse         frames, keep-alive, disconnect
record      usage, speculation record     metrics     Prometheus
"""
