"""Generation of tokens for batches of prompts. From the bottom up:

sampling         logits → tokens, with each row's sampling parameters
sequence         one answer: its tokens, text, grammar and end; which sequence caused a fault
prompt_scoring   the logprobs of a prompt's tokens, computed while it is read
prefill          choice of the prompts and chunks that are read together; images are encoded first
decode_batch     sequences between two decode steps; the choice of their next tokens
label_scoring    questions answered by the logprobs of their labels
self_test        a comparison of batched sequences with the same sequences run alone
prepare          a job → its sequences: prompts, limits and sampling; checks the context's length
sequences        a sequence from join to last token: prefill, decode, retries after faults
engine           one model: a step changes the batch and runs a pass; the prefix cache
loading          a folder or GGUF file → an engine; tries the answer formats on made-up turns
"""
