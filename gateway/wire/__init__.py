"""OpenAI's names, all of them, and only here: one file an endpoint, with its request and answer.

chat, completions, embeddings      request → job; what is made of it → the answer, as TypedDicts
responses                          the same of a Responses request, and the shape of its answer
responses_stream                   deltas → output items, and the events in which they grow
responses_items, responses_tools   its input items, kept and read again; its flat tools
legacy                             older request fields, read as today's
messages                           chat messages and tools → what chat templates read
generation                         what all but embeddings share: sampling, forms, usage, logprobs
validation, bounds                 bytes → a checked request, or the 400 that names the field
schemas                            requests and answers → JSON Schemas, for /openapi.json
"""
