"""All of OpenAI's and Anthropic's names, and only here: one file for each endpoint, with its
request and answer.

chat, completions, embeddings      request → job; deltas or vectors → the answer, as TypedDicts
rerank                             query and documents → job; scores → the answer
decisions                          input and questions → jobs; logprobs → probabilities
responses                          request → job, and the shape of the answer
responses_stream                   deltas → output items, and the events in which they grow
responses_items                    input items → messages, or JSON to store
anthropic                          Messages request → job; the answer's shape; errors; models
anthropic_stream                   deltas → content blocks, and their events
anthropic_blocks                   input blocks → turns
tokenization                       a prompt to tokenize; its tokens, and the text of some
pulls                              a model to download, and how far that has got
images                             images read, left out or refused; none is shown in a log
messages, tools                    chat messages, and tools of all APIs → the form of templates
generation                         shared by chat, completions, responses: sampling, forms, logprobs
validation, bounds                 bytes → a checked request, or the 400 that names the field
answers                            the base of all writers of answers: events, or the whole
"""
