"""Prompts → tokens, in batches. From the bottom up:

sampling         logits → tokens, each row by its own parameters
speculation      tokens that are read ahead: drafts, and how many
sequence         one answer: its tokens, text, grammar and end
scoring          logprobs of a prompt
prefill          which prompts are read together, and in what chunks
decode_batch     sequences between two decode steps
draft_model      a smaller model, whose guesses are read ahead
drafting         which sequences read ahead, and whose drafts
token_choice     logits of a pass → the batch's next tokens
judging          questions → steps into their labels; the logprobs of those
prepare          a job → the sequences it asks for, measured and begun
self_test        sequences in batches compared with the same alone
batch_faults     what passes have raised, and who is to blame
engine           one model: join, prefill, decode, leave
loading          a folder or GGUF file → an engine
"""
