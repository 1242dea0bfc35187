"""Prompts → tokens, in batches. From the bottom up:

detokenizer      token ids → text, stop strings, the vocabulary as bytes
output_parts     an answer's parts: text, reasoning, calls; the marks between them
tool_formats     how each family marks its tool calls; picks one by the chat template
tool_parsers     the text of a tool call → its function and arguments
harmony          gpt-oss's channels
reasoning        where thinking begins and ends
parsing          text → parts, as it comes
chat_template    messages → prompt, in the sandbox
sampling         logits → tokens, each row by its own parameters
speculation      tokens that are read ahead: drafts, and how many
sequence         one answer: its tokens, text, grammar and end
scoring          logprobs of a prompt
adapter_files    a LoRA adapter's folder, read and checked
adapters         LoRA adapters of one model, many in one pass
kv_cache         the KV of sequences of different lengths, side by side
quantized_kv     the same in 8 or 4 bits
prefix_cache     KV that later prompts may begin with
prefill          which prompts are read together, and in what chunks
decode_batch     sequences between two decode steps
draft_model      a smaller model, whose guesses are read ahead
drafting         which sequences read ahead, and whose drafts
token_choice     logits of a pass → the batch's next tokens
chat             a model's template, formats and vocabulary together
judging          questions → steps into their labels; the logprobs of those
prepare          a job → the sequences it asks for, measured and begun
self_test        sequences in batches compared with the same alone
batch_faults     what passes have raised, and who is to blame
engine           one model: join, prefill, decode, leave
loading          a folder or GGUF file → an engine
"""
