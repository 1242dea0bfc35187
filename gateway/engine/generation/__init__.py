"""Prompts → tokens, in batches. From the bottom up:

sampling         logits → tokens, each row by its own parameters
sequence         one answer: its tokens, text, grammar and end
scoring          logprobs of a prompt
prefill          which prompts are read together, and in what chunks
decode_batch     sequences between two decode steps; logits of a pass → their next tokens
label_scoring    questions → steps into their labels; the logprobs of those
prepare          a job → the sequences it asks for, measured and begun
self_test        sequences in batches compared with the same alone
batch_faults     what passes have raised, and who is to blame
sequences        from join to last token: prefill, decode, leave; read again after a fault
engine           one model: a step changes its batch and runs a pass
loading          a folder or GGUF file → an engine
"""
