"""HTTP: one file an endpoint, no tensors. From the top down:

app                                      the table of endpoints, and the application it makes
access                                   keys, hosts, origins, rates: who may come in, how often
chat, completions, embeddings, responses read, lease, ask, answer; whole or as a stream
models                                   what is served, and /admin to load, unload and reload
ops                                      /health, /ready, /metrics, /openapi.json
generation                               what chat, completions and responses share
openapi, endpoint                        the document and the docs' tables; what an endpoint is
middleware                               ids, timings, requests under way, every error as JSON
streams                                  server-sent events; stopping when the client leaves
requests                                 what every handler is given; bodies within limits
"""
