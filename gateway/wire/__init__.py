"""OpenAI's and Anthropic's names, all of them, and only here: one file an endpoint, with its
request and answer.

chat, completions, embeddings      request → job; deltas or vectors → the answer, as TypedDicts
rerank                             query and documents → job; scores → the answer
decisions                          input and questions → jobs; logprobs → probabilities
responses                          request → job, and the shape of the answer
responses_stream                   deltas → output items, and the events in which they grow
responses_items                    its input items → messages, or to store
anthropic                          Messages request → job; the answer's shape; errors; models
anthropic_stream                   deltas → content blocks, and their events
anthropic_blocks                   its input blocks → turns
tokenization                       a prompt to tokenize; its tokens, and the text of some
pulls                              a model to download, and how far that has got
images                             those of earlier turns left out, or all refused
messages, tools                    chat messages, and tools of all APIs → what templates read
generation                         of chat, completions, responses: sampling, forms, usage, logprobs
validation, bounds                 bytes → a checked request, or the 400 that names the field
answers                            what each writer of answers does: events, or the whole
"""
