"""HTTP: one file an endpoint, no tensors. From the top down:

app                           the application: routes, access, errors
endpoints                     the table of all endpoints
access                        API keys, hosts, origins, rate limits
chat                          chat completions, completions, and Anthropic's messages
responses                     /v1/responses, and answers that are kept
decisions                     questions about an input, judged by their labels
embeddings, rerank            vectors and scores
tokenization                  tokens of prompts, and texts of tokens
models                        the list of models; /admin to load, unload, pin and reload
dashboard                     the page /dashboard, and the samples that it shows
ops                           /health, /ready, /metrics, /openapi.json
exchange                      a request for text → jobs → deltas → an answer or a stream of events
openapi, endpoint             the document and the docs' tables; what an endpoint is
middleware                    ids, timings, every error as JSON
traces                        a span for each request, where the extra `otel` sends them
streams                       server-sent events: framing, priming, silences
disconnects                   clients that leave: their work is cancelled
requests                      the service that handlers use; bodies → checked requests
bodies                        request bodies within limits, each and all together
in_flight                     requests in flight, the last errors, who watches
"""
