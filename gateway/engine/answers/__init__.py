"""Turns tokens into an answer's text, reasoning and calls, without mlx. From the bottom up:

detokenizer    decodes a growing list of token ids into text, and single tokens into text or bytes
stop_strings   ends a text before its first stop string
output_parts   an answer's parts: text, reasoning, calls; the marks between them
harmony        reads gpt-oss's channels
call_values    the types of calls and readers; converts an argument's text to a value by its
               schema; reads JSON and Python as models write them; writes calls as text
call_bodies    reads calls whose bodies are JSON or Python
gemma_calls    reads the bodies of Gemma's calls
minimax_calls  reads the bodies of MiniMax M3's calls
pairs          reads calls whose arguments are pairs of a name and a text
tool_formats   one row per call format; picks a model's format by its chat template
reasoning      one row per way to mark thinking; tracks whether a sequence is thinking
parsing        splits a growing text into parts
response_template  reads whole answers with their checkpoint's own patterns, in the sandbox
answer_format  a model's formats and tokens: makes the parsers of its answers
"""
