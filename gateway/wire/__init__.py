"""Requests and answers in the formats of OpenAI, Anthropic and other APIs.

chat, completions, embeddings      request → job; deltas or vectors → the answer, as TypedDicts
cohere                             Cohere's requests for vectors → job; vectors → its answers
rerank                             query and documents → job; scores → the answer
decisions                          input and questions → jobs; logprobs → probabilities
responses                          request → job, and the shape of the answer
responses_stream                   deltas → output items, and the events that stream them
responses_items                    input items → messages, or JSON to store
anthropic                          Messages request → job; the answer's shape; errors; models
anthropic_stream                   deltas → content blocks, and their events
anthropic_blocks                   input blocks → turns
tokenization                       prompt → tokens; tokens → text
pulls                              a model to download, and the progress of the download
images                             reads, leaves out or refuses images; hides them from logs
messages, tools                    chat messages, and tools of all APIs → input of chat templates
generation                         shared by chat, completions, responses: sampling, grammars,
                                   logprobs
validation, bounds                 bytes → a checked request, or a 400 that names the field
answers                            base classes that write answers, streamed or whole
"""
