"""Generation of tokens for batches of prompts, from the lowest module to the highest:

sampling         chooses tokens from logits, with each row's sampling parameters
sequence         the state of one answer; the search for the sequence that made a pass fail
prompt_scoring   the logprobs of a prompt's tokens
prefill          chooses and reads the prompts of the next pass
decode_batch     the sequences of a decode step, and the choice of their next tokens
label_scoring    answers questions with the logprobs of their labels
self_test        tests whether a model computes the same logits in a batch as alone
prepare          makes the parameters of a job's sequences
sequences        all sequences of a model: join, prefill, decode, retry after a fault, leave
engine           runs one model, step by step
loading          loads an engine from a folder or a GGUF file
"""
