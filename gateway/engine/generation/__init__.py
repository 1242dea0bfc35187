"""Generation of tokens for batches of prompts. From the bottom up:

sampling         logits → tokens, with each row's sampling parameters
sequence         one answer: its tokens, text, grammar and end; the search for a fault's sequence
prompt_scoring   the logprobs of a prompt's tokens, computed while it is read
prefill          choice of the prompts and chunks that are read together; images are encoded first
decode_batch     sequences between two decode steps; the choice of their next tokens
label_scoring    questions answered by the logprobs of their labels
self_test        compares answers of a batch with answers to the same prompts run alone
prepare          a job → its sequences: prompts, limits and sampling; checks the prompts' length
sequences        a sequence from join to last token: prefill, decode, retries after faults
engine           one model: a step changes the batch and runs a pass; the prefix cache
loading          a folder or GGUF file → an engine; tries the answer formats on made-up turns
"""
