"""Prompts → tokens, in batches. From the bottom up:

sampling         logits → tokens, each row by its own parameters
sequence         one answer: its tokens, text, grammar and end; the blame for a fault
prefill          the prompts that are read together, and their chunks; their logprobs
decode_batch     sequences between two decode steps; logits of a pass → their next tokens
label_scoring    questions → steps into their labels; the logprobs of the labels
self_test        sequences in batches compared with the same alone
prepare          a job → its sequences: their prompts, n, sampling, max_tokens; a context too long
sequences        from join to last token: prefill, decode, leave; read again after a fault
engine           one model: a step changes the batch and runs a pass; the KV kept of prompts
loading          a folder or GGUF file → an engine, once its formats have read a trial turn
"""
