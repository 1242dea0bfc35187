"""HTTP: one file for each endpoint, no tensors. From the top down:

app                           the application: routes, access, errors
paths                         sets of paths: open, metered, untraced
endpoints                     the table of all endpoints
access                        API keys, hosts, origins, rate limits
chat                          chat completions, completions, Anthropic's messages, decisions
responses                     /v1/responses, whose answers are kept to continue from
embeddings, rerank            vectors and scores
tokenization                  tokens of prompts, and texts of tokens
models                        the list of models, and /admin for models
dashboard                     the pages /dashboard and /docs, and a stream of samples
ops                           /health, /ready, /metrics, /openapi.json
exchange                      a request for text → jobs → deltas → an answer or a stream of events
openapi                       the class `Endpoint`; the document at /openapi.json
middleware                    ids, timings, every error as JSON
traces                        a span for each request, sent if the extra `otel` is installed
streams                       server-sent events: framing, the first event, keep-alives
requests                      the service that handlers use; bodies → checked requests
bodies                        request bodies, and limits of their size
in_flight                     the requests in flight, and the watchers of the dashboard

"""
